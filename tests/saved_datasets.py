"""Datasets as Hugging Face's `save_to_disk` writes them, by pyarrow alone."""

import json
from pathlib import Path

import pyarrow as pa


def write_saved(folder: Path, images: list[bytes], numbers: list[int], names: list[str]) -> None:
    """Writes a dataset without parts, of images with the numbers of their classes."""
    folder.mkdir(parents=True)
    features = {"image": {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    structs = [{"bytes": each, "path": None} for each in images]
    table = pa.table({"image": structs, "label": pa.array(numbers, pa.int64())})
    table = table.replace_schema_metadata(metadata)
    name = "data-00000-of-00001.arrow"
    with (folder / name).open("wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    (folder / "dataset_info.json").write_text(json.dumps({"features": features}))


def write_saved_parts(
    folder: Path, parts: dict[str, tuple[list[bytes], list[int]]], names: list[str]
) -> None:
    """Writes a dataset of several parts."""
    for part, (images, numbers) in parts.items():
        write_saved(folder / part, images, numbers, names)
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(parts)}))

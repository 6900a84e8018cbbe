"""The figures of docs/reference/starter.md: what the starter's images and texts are worth.

    python benchmarks/starter.py ../shared/data

The folder holds caltech101_20, coco_multi_captions, fashion_products and, for the bridge,
encoders/mobilenet_v2_imagenet.
"""

import argparse
import csv
import hashlib
import json
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx

from mlcd.artifacts.draft import Draft
from mlcd.artifacts.manifest import Request
from mlcd.encoders import open_encoder, open_text_encoder
from mlcd.export.onnx_graph import GraphWriter, embedding_output, opset_of, pixels_input
from mlcd.images.transform import PreprocessSpec
from mlcd.pipelines.bridge import bridge_model
from mlcd.pipelines.resolve import resolve_model
from mlcd.progress import Reporter

BATCH: Final = 32
PROMPT: Final = "a photo of a {}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--model", default="starter")
    arguments = parser.parse_args()
    model = Model(resolve_model(arguments.model))
    for name, value in [
        *on_caltech(model, arguments.data),
        *on_coco(model, arguments.data),
        *on_fashion(model, arguments.data),
        *through_a_bridge(model, arguments.data),
    ]:
        print(f"{name:64} {value}", flush=True)


class Model:
    """Both encoders of one model."""

    def __init__(self, path: str) -> None:
        self.path = path

    def images(self, files: list[Path]) -> Any:
        with closing(open_encoder(self.path)) as encoder:
            rows = []
            for start in range(0, len(files), BATCH):
                batch = files[start : start + BATCH]
                pixels = [encoder.preprocess.prepare(file.read_bytes()) for file in batch]
                rows.append(encoder.encode(np.stack(pixels)))
            return np.concatenate(rows)

    def texts(self, texts: list[str]) -> Any:
        with closing(open_text_encoder(self.path)) as encoder:
            return encoder.encode(encoder.tokenizer(texts))

    @property
    def scale(self) -> float:
        with closing(open_text_encoder(self.path)) as encoder:
            return encoder.calibration.scale


def on_caltech(model: Model, data: Path) -> Any:
    """Yields figures of 800 photographs of 20 classes."""
    files = sorted(data.glob("caltech101_20/*/*.jpg"))
    classes = sorted({file.parent.name for file in files})
    right = np.array([classes.index(file.parent.name) for file in files])
    rows = model.images(files)
    names = [name.replace("_", " ").lower() for name in classes]
    yield "caltech101_20: 5-NN, leave one out", f"{leave_one_out(rows, right):.3f}"
    for prompt in (PROMPT, "{}"):
        texts = model.texts([prompt.format(name) for name in names])
        scores = rows @ texts.T
        found = np.argsort(-scores, axis=0)[:10]
        precise = (right[found] == np.arange(len(classes))).mean()
        accuracy = (scores.argmax(axis=1) == right).mean()
        yield f"caltech101_20: text -> image P@10, '{prompt}'", f"{precise:.3f}"
        yield f"caltech101_20: 20-way zero-shot, '{prompt}'", f"{accuracy:.3f}"
        if prompt == PROMPT:
            error = calibration_error(model.scale * scores, right)
            yield "caltech101_20: calibration error of the probabilities", f"{error:.3f}"


def on_coco(model: Model, data: Path) -> Any:
    """Yields figures of 100 photographs with 5 captions each."""
    folder = data / "coco_multi_captions"
    lines = [json.loads(line) for line in (folder / "labels.jsonl").read_text().splitlines()]
    captioned = [line for line in lines if line["captions"]]
    rows = model.images([folder / line["path"] for line in captioned])
    captions = [text for line in captioned for text in line["captions"]]
    right = [number for number, line in enumerate(captioned) for _ in line["captions"]]
    yield from recalls(
        "coco_multi_captions: caption -> 1 of 100", model.texts(captions), rows, right
    )


def on_fashion(model: Model, data: Path) -> Any:
    """Yields figures of the products of the test split, by what they are called."""
    folder = data / "fashion_products"
    with (folder / "labels.csv").open() as file:
        products = [line for line in csv.DictReader(file) if line["split"] == "test"]
    rows = model.images([folder / product["path"] for product in products])
    texts = model.texts([product["caption"] for product in products])
    name = f"fashion_products: caption -> 1 of {len(products)}"
    yield from recalls(name, texts, rows, list(range(len(products))))


def through_a_bridge(model: Model, data: Path) -> Any:
    """Yields figures of MobileNetV2 with the model's texts, joined on Caltech's photographs."""
    with tempfile.TemporaryDirectory() as folder:
        mobilenet = wrap_mobilenet(data, Path(folder) / "mobilenet")
        for kind in ("mixture", "ridge"):
            made = bridge_model(
                str(mobilenet),
                Path(folder) / kind,
                text_from=model.path,
                kind=kind,
                images=str(data / "caltech101_20"),
                reporter=Reporter("silent"),
            )
            named = f"bridge to MobileNetV2, {kind}"
            yield f"{named}: 20-way zero-shot, held out", made.summary["bridge_zero_shot"]
            at = [made.summary[f"bridge_recall_at_{rank}"] for rank in (1, 5, 10)]
            yield f"{named}: image -> itself R@1/5/10, held out", at
            for name, value in on_coco(Model(str(made.path)), data):
                yield f"{named}, {name}", value


def wrap_mobilenet(data: Path, out: Path) -> Path:
    """Returns MobileNetV2 as a model artifact of images only."""
    graph = GraphWriter()
    inner = onnx.load(data / "encoders/mobilenet_v2_imagenet/mobilenet_v2_1.0_224.onnx")
    scale = graph.number(127.5)
    pixels = graph.add("Sub", graph.add("Cast", "image_u8", to=1), scale)
    features, _ = graph.include(
        inner, "mobilenet", {"pixel_values": graph.add("Div", pixels, scale)}
    )
    graph.rename(graph.unit_rows(features), "embedding")
    model = graph.model(
        inputs=[pixels_input(224)], outputs=[embedding_output(1280)], opset=opset_of(inner)
    )
    spec = PreprocessSpec(256, 224, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    with Draft(out, Request("model", {"name": "mobilenet"})) as draft:
        with draft.write("model.onnx") as path:
            onnx.save(model, path)
        with draft.write("preprocess.json") as path:
            path.write_text(spec.to_json())
        digest = hashlib.sha256(draft.path.joinpath("model.onnx").read_bytes()).hexdigest()
        summary = {"dimension": 1280, "weights_digest": digest}
        draft.publish(fingerprint=spec.fingerprint(digest), summary=summary)
    return out


def recalls(name: str, texts: Any, rows: Any, right: list[int]) -> Any:
    """Yields the shares of texts whose image is among the first 1, 5 and 10."""
    scores = texts @ rows.T
    better = (scores > scores[np.arange(len(texts)), right][:, None]).sum(axis=1)
    yield f"{name}, R@1/5/10", [round(float((better < rank).mean()), 3) for rank in (1, 5, 10)]


def leave_one_out(rows: Any, right: Any, num: int = 5) -> float:
    """Returns the share of rows whose class has the most similarity among their 5 neighbors."""
    scores = rows @ rows.T
    np.fill_diagonal(scores, -np.inf)
    nearest = np.argsort(-scores, axis=1)[:, :num]
    votes = np.zeros((len(rows), right.max() + 1))
    for neighbors in nearest.T:
        votes[np.arange(len(rows)), right[neighbors]] += scores[np.arange(len(rows)), neighbors]
    return float((votes.argmax(axis=1) == right).mean())


def calibration_error(logits: Any, right: Any, bins: int = 10) -> float:
    """Returns the mean distance between a probability and the share that is right, over bins."""
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    sure, hit = shares.max(axis=1), shares.argmax(axis=1) == right
    bin_of = np.minimum((sure * bins).astype(int), bins - 1)
    return float(
        sum(
            abs(sure[bin_of == each].mean() - hit[bin_of == each].mean()) * (bin_of == each).mean()
            for each in set(bin_of.tolist())
        )
    )


if __name__ == "__main__":
    main()

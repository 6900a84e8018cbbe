import pytest
from PIL import Image

from mlcd.artifacts.labels import NAMES
from mlcd.errors import InvalidInput
from mlcd.pipelines.label_classes import label_classes
from mlcd.progress import Reporter

SILENT = Reporter("silent")


def write_images(folder, *class_names):
    for name in class_names:
        (folder / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(folder / name / "1.png")
    return folder


@pytest.mark.parametrize(
    "folders",
    [
        ("train/cat", "train/dog", "test/cat", "test/dog"),
        ("Train/cat", "Validation/cat"),
        ("train", "dev"),
        ("train/cat", "val/cat", "other/cat"),
    ],
)
def test_parts_of_a_data_set_are_no_classes(tmp_path, folders):
    images = write_images(tmp_path / "images", *folders)
    train = folders[0].split("/")[0]
    with pytest.raises(InvalidInput, match="are parts of a data set") as error:
        label_classes(str(images), tmp_path / "labels", SILENT)
    assert f"--train {images}/{train} --test {images}/" in str(error.value)
    assert f"would make {len(folders)} classes" in str(error.value)


@pytest.mark.parametrize(
    "folders", [("bus", "train"), ("train/steam", "bus"), ("train/a", "train/b")]
)
def test_one_part_or_a_railway_is_a_class(tmp_path, folders):
    images = write_images(tmp_path / "images", *folders)
    labels = label_classes(str(images), tmp_path / "labels", SILENT)
    assert labels.file(NAMES).read_text().count('"') == 2 * len(folders)

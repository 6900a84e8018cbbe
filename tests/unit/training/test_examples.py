from mlcd.artifacts.examples import EXAMPLES, Examples
from mlcd.artifacts.labels import LabelTable
from mlcd.training.config import load_config
from mlcd.training.data.class_examples import class_examples, write_examples
from mlcd.training.data.dataset import open_dataset
from tests.unit.disk_order import check_durable, recorded


def dataset_of(tiny_recipe, *places):
    """One data set for each (images, labels)."""
    mix = [{"images": str(images), "labels": str(labels)} for images, labels in places]
    return open_dataset(load_config(str(tiny_recipe), [f"data.mix={mix}", "out=unused"]))


def by_sorting(dataset):
    """The definition, in plain words: of each class the samples of highest score, then the ones
    trained on.
    """
    found = [[] for _ in range(dataset.num_centers)]
    for number, (part, table) in enumerate(zip(dataset.parts, dataset.label_tables, strict=True)):
        trained = set(part.entries.keys())
        scores = table._column("scores").to_pylist()
        for row, key in enumerate(table.keys):
            found[table.ids[row, 0]].append((-scores[row][0], number, row, key, key in trained))
    return [[key for *_, key, is_trained in sorted(samples)[:8] if is_trained] for samples in found]


def test_examples_of_a_class_are_its_samples_of_highest_score_that_are_trained_on(
    labeled, digits, tiny_recipe
):
    dataset = dataset_of(tiny_recipe, (digits, labeled / "labels"))
    examples = class_examples(dataset)
    found = [
        [example.key for example in examples.of_center(number)] for number in range(len(examples))
    ]
    assert found == by_sorting(dataset)
    assert sum(map(len, found)) < 80  # some are held out
    assert {
        example.similarity for number in range(10) for example in examples.of_center(number)
    } == {None}


def test_they_come_from_all_data_sets_of_a_mixture(labeled, digits, tiny_recipe):
    dataset = dataset_of(tiny_recipe, (digits, labeled / "labels"), (digits, labeled / "labels"))
    examples = class_examples(dataset)
    assert [
        [example.key for example in examples.of_center(number)] for number in range(10)
    ] == by_sorting(dataset)


def test_they_are_written_once(labeled, digits, tiny_recipe, tmp_path):
    dataset = dataset_of(tiny_recipe, (digits, labeled / "labels"))
    with recorded() as steps:
        write_examples(dataset, tmp_path)
    check_durable(steps, tmp_path / EXAMPLES)
    before = (tmp_path / EXAMPLES).stat().st_mtime_ns
    write_examples(dataset, tmp_path)
    assert (tmp_path / EXAMPLES).stat().st_mtime_ns == before
    assert (
        len(Examples.open(tmp_path / EXAMPLES)) == LabelTable.open(labeled / "labels").num_centers
    )
    assert [path.name for path in tmp_path.iterdir()] == [EXAMPLES]

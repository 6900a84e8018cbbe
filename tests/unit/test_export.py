import shutil

import pytest
import torch

from mlcd.errors import ArtifactInvalid, ConfigInvalid
from mlcd.export import model_artifact as export
from mlcd.progress import Reporter

SILENT = Reporter("silent")


def test_a_graph_that_disagrees_with_the_model_is_not_published(journey, tmp_path, monkeypatch):
    original = export.write_image_graph

    def slightly_wrong(model, side, path):
        with torch.no_grad():
            model.trunk.pos.add_(
                0.3 * torch.randn(model.trunk.pos.shape, generator=torch.Generator().manual_seed(0))
            )
        original(model, side, path)
        with torch.no_grad():
            model.trunk.pos.zero_()

    monkeypatch.setattr(export, "write_image_graph", slightly_wrong)
    with pytest.raises(ArtifactInvalid, match="differs from the trained one"):
        export.export_model(
            journey / "run", tmp_path / "model", name="m", images=None, reporter=SILENT
        )
    assert not (tmp_path / "model").exists()


def test_without_images_parity_is_measured_on_real_photographs(journey, tmp_path):
    run = tmp_path / "some" / "where" / "else" / "run"
    shutil.copytree(journey / "run", run)
    artifact = export.export_model(run, tmp_path / "model", name="m", images=None, reporter=SILENT)
    assert artifact.summary["parity_source"] == "scikit-learn"
    assert artifact.summary["parity_min_cosine"] > 0.9999


@pytest.mark.parametrize("name", ["../up", "", 'a"b', "a\nb", "猫", ".hidden"])
def test_a_name_that_is_a_path_or_breaks_a_header_is_refused(journey, tmp_path, name):
    with pytest.raises(ConfigInvalid, match="cannot name a model"):
        export.export_model(
            journey / "run", tmp_path / "model", name=name, images=None, reporter=SILENT
        )

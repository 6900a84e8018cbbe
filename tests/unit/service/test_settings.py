import pytest

from mlcd.errors import ConfigInvalid, ImageRejected
from mlcd.service.http.problems import status_of
from mlcd.service.settings import read_settings, setting_names


def test_settings_come_from_the_environment_and_options_win(monkeypatch):
    monkeypatch.setenv("MLCD_MODEL", "from-environment")
    monkeypatch.setenv("MLCD_LIMITS__MAX_IMAGES", "3")
    settings = read_settings({"port": 9, "model": None})
    assert (settings.model, settings.port, settings.limits.max_images) == ("from-environment", 9, 3)
    assert read_settings({"model": "from-option"}).model == "from-option"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("MLCD_MODLE", "x", "did you mean MLCD_MODEL"),
        ("MLCD_LIMITS__MAX_IMAGE", "3", "did you mean MLCD_LIMITS__MAX_IMAGES"),
        ("MLCD_PORT", "many", "MLCD_PORT"),
        ("MLCD_LIMITS__MAX_IMAGES", "0", "MLCD_LIMITS__MAX_IMAGES"),
    ],
)
def test_a_wrong_setting_is_refused_with_a_hint(monkeypatch, name, value, message):
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigInvalid, match=message):
        read_settings({"model": "m"})


TRITON = {"model": "tiny", "engine": "triton", "triton": {"url": "127.0.0.1:8001"}}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "hog", "engine": "fake"}, "if and only if the model is fake"),
        ({"model": "fake:latency_ms=5"}, "if and only if the model is fake"),
        (
            {"model": "tiny", "engine": "triton"},
            "mlcd_triton__url must be set if and only if .* got engine triton and no url",
        ),
        ({"model": "tiny", "triton": {"url": "127.0.0.1:8001"}}, "got engine auto and"),
        (TRITON | {"precision": "int8"}, "precision int8 is not for engine triton"),
        (TRITON | {"triton": {"url": "h:1", "version": 0}}, "MLCD_TRITON__VERSION"),
        (
            {"model": "hog", "limits": {"max_queued_bytes": 1}},
            "must not be less than max_body_bytes",
        ),
        ({"model": "hog", "limits": {"max_queued_images": 3}}, "must not be less than max_images"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, message):
    with pytest.raises(ConfigInvalid, match=message):
        read_settings(settings)
    assert read_settings({"model": "fake:latency_ms=5", "engine": "fake"}).engine == "fake"


def test_a_missing_model_is_named():
    with pytest.raises(ConfigInvalid, match="--model is required: give --model starter"):
        read_settings({})


def test_every_name_is_upper_case_and_prefixed():
    assert "MLCD_LIMITS__DEADLINE_S" in setting_names()
    assert all(name == name.upper() and name.startswith("MLCD_") for name in setting_names())


def test_an_image_s_status_follows_its_reason():
    reasons = {"too-many-pixels": 413, "unsupported-format": 415, "undecodable": 422, "empty": 422}
    for reason, status in reasons.items():
        assert status_of(ImageRejected(reason, "…")) == status


def test_the_folder_of_the_collections_is_not_taken_for_the_state(tmp_path, monkeypatch):
    state = tmp_path / "state"
    for name in ("a", "b"):
        (state / "collections" / name).mkdir(parents=True)
        (state / "collections" / name / "items.sqlite").touch()
    assert read_settings({"model": "hog", "state_dir": str(state)}).state_dir == str(state)
    for given in (state / "collections", state / "collections" / "a"):
        with pytest.raises(ConfigInvalid, match=rf"did you mean {state}\?"):
            read_settings({"model": "hog", "state_dir": str(given)})
    monkeypatch.chdir(state / "collections")
    with pytest.raises(ConfigInvalid, match=rf"did you mean {state}\?"):
        read_settings({"model": "hog", "state_dir": "."})

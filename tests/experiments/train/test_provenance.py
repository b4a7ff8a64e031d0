from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from apo_experiments import backends, provenance


@pytest.fixture(autouse=True)
def _forget():
    provenance.commit.cache_clear()
    yield
    provenance.commit.cache_clear()


def test_passwords_and_folders_stay_out_of_the_record(monkeypatch):
    storage = "--storage=postgresql+psycopg://me:s3cret@host:5432/study"
    monkeypatch.setattr(sys, "argv", ["/home/me/bin/apo", "sweep", storage, "postgresql://me@host/study", "a:b@c"])
    assert provenance.command() == [
        "apo",
        "sweep",
        "--storage=postgresql+psycopg://me:***@host:5432/study",
        "postgresql://me@host/study",
        "a:b@c",
    ]


def git(folder, *arguments):
    identity = ["-c", "user.name=someone", "-c", "user.email=someone@example.org"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository with a copy of the module; the module believes that it lies there."""
    try:
        git(tmp_path, "init")
    except OSError:
        pytest.skip("git is not installed")
    source = tmp_path / "src" / "apo_experiments" / "provenance.py"
    source.parent.mkdir(parents=True)
    source.write_text("one")
    monkeypatch.setattr(provenance, "__file__", str(source))
    return tmp_path, source


def test_the_commit_is_that_of_the_source_and_says_when_it_is_dirty(checkout):
    folder, source = checkout
    git(folder, "add", ".")
    git(folder, "commit", "-m", "first")
    head = provenance.commit()
    assert head is not None and len(head) == 40
    provenance.commit.cache_clear()
    source.write_text("two")
    assert provenance.commit() == f"{head}-dirty"


def test_a_copy_in_somebody_elses_repository_has_no_commit(checkout):
    folder, _ = checkout
    (folder / "other").write_text("their own")
    git(folder, "add", "other")
    git(folder, "commit", "-m", "theirs")
    assert provenance.commit() is None


def test_without_git_there_is_no_commit(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert provenance.commit() is None


def test_versions_name_what_is_installed_and_nothing_else(monkeypatch):
    def missing(name):
        raise provenance.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(provenance.importlib.metadata, "version", missing)
    assert provenance.versions().keys() - {"cuda"} == {"python", "torch", "apo"}


def test_the_cpu_has_a_name():
    assert provenance.hardware(provenance.torch.device("cpu"))["cpu"]
    assert Path(provenance.__file__).exists()


def test_the_switches_of_a_gpu_are_those_of_the_options_and_are_recorded(monkeypatch):
    cuda, before = torch.device("cuda"), [getattr(owner, name) for owner, name, _, _ in backends._tf32_switches()]
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    try:
        backends.configure(cuda, {})
        assert backends.described(cuda) == {"tf32": False, "cudnn_benchmark": True}
        backends.configure(cuda, {"tf32": True, "cudnn_benchmark": False})
        assert backends.described(cuda) == {"tf32": True, "cudnn_benchmark": False}
    finally:
        for (owner, name, _, _), value in zip(backends._tf32_switches(), before, strict=True):
            setattr(owner, name, value)

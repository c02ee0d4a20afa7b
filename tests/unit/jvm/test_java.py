"""Which Java the embedded stack uses, and its message if it finds no usable one."""

from __future__ import annotations

import pytest

from tidemark.jvm.errors import JavaUnusable
from tidemark.jvm.java import find_java, major, released


def java(folder, version, status=0):
    """Creates a ``java`` in ``folder/bin`` that only prints its version. Returns ``folder``."""
    program = folder / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2025-04-15' >&2\nexit {status}\n")
    program.chmod(0o755)
    return folder


@pytest.fixture
def machine(monkeypatch):
    """A machine without Java, but with a shell."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    return monkeypatch


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('java version "1.8.0_402"', 8),
        ('openjdk version "25-ea" 2025-09-16', 25),
        ('Picked up JAVA_TOOL_OPTIONS: -Dx=1\nopenjdk version "21" 2023-09-19', 21),
        ("No Java runtime present, requesting install.", None),
    ],
)
def test_the_major_version_is_read_from_every_form_of_answer(text, version):
    """Old releases are numbered 1.8, early access releases have a suffix, and a line about options may come first."""
    assert major(text) == version


@pytest.mark.parametrize(
    ("text", "version"),
    [('IMPLEMENTOR="x"\nJAVA_VERSION="17.0.15"\n', 17), ('JAVA_VERSION="25-ea"\n', 25), ('IMPLEMENTOR="x"\n', None), (None, None)],
)
def test_the_major_version_is_read_from_a_javas_home_also_through_a_link(tmp_path, text, version):
    """Not every vendor's Java states its version in the ``release`` file."""
    home = java(tmp_path / "home", "0")
    if text is not None:
        (home / "release").write_text(text)
    (tmp_path / "java").symlink_to(home / "bin" / "java")
    assert released(tmp_path / "java") == version


def test_java_home_goes_before_path(machine, tmp_path):
    """Java tools generally use this order. Spark reads JAVA_HOME too: ignoring one without Java would only delay the failure."""
    with pytest.raises(JavaUnusable, match=r"Java 17 or newer is needed; JAVA_HOME is not set: no java is on PATH\. Install Java 17"):
        find_java()
    machine.setenv("PATH", str(java(tmp_path / "path", "17.0.1") / "bin"))
    assert find_java() == tmp_path / "path" / "bin" / "java"
    machine.setenv("JAVA_HOME", str(java(tmp_path / "home", "21.0.1")))
    assert find_java() == tmp_path / "home" / "bin" / "java"
    machine.setenv("JAVA_HOME", str(tmp_path / "gone"))
    with pytest.raises(JavaUnusable, match=r"JAVA_HOME is .*gone: it has no bin/java"):
        find_java()


@pytest.mark.parametrize(
    ("version", "status", "said"), [("11.0.22", 0, "its version is 11"), ("17.0.1", 1, "it does not print its version")]
)
def test_a_java_that_is_old_or_fails_is_refused(machine, tmp_path, version, status, said):
    """Some systems have a ``java`` that only says where to get Java."""
    machine.setenv("JAVA_HOME", str(java(tmp_path, version, status)))
    with pytest.raises(JavaUnusable, match=said) as refused:
        find_java()
    assert str(tmp_path) in str(refused.value)


def test_a_java_that_was_killed_while_it_answered_is_asked_once_more(machine, tmp_path):
    """A process that was killed from outside says nothing about its Java."""
    home = java(tmp_path / "seventeen", "17.0.15")
    program, first = home / "bin" / "java", tmp_path / "first"
    program.write_text(program.read_text().replace("#!/bin/sh\n", f"#!/bin/sh\n[ -e {first} ] || {{ : > {first}; kill -9 $$; }}\n"))
    machine.setenv("JAVA_HOME", str(home))
    assert find_java() == program
    program.write_text("#!/bin/sh\nkill -9 $$\n")
    with pytest.raises(JavaUnusable, match="no output"):
        find_java()

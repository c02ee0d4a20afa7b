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
    """Java tools generally use this order."""
    home = java(tmp_path / "home", "21.0.1")
    machine.setenv("PATH", str(java(tmp_path / "path", "17.0.1") / "bin"))
    machine.setenv("JAVA_HOME", str(home))
    assert find_java() == home / "bin" / "java"


def test_java_on_path_is_taken_where_java_home_is_not_set(machine, tmp_path):
    machine.setenv("PATH", str(java(tmp_path, "17.0.1") / "bin"))
    assert find_java() == tmp_path / "bin" / "java"


def test_no_java_at_all_is_told_with_what_to_do(machine):
    with pytest.raises(JavaUnusable, match=r"Java 17 or newer is needed; JAVA_HOME is not set: no java is on PATH\. Install Java 17"):
        find_java()


def test_a_java_home_without_java_is_refused_though_path_has_one(machine, tmp_path):
    """Spark reads JAVA_HOME too: ignoring it here would only delay the failure."""
    machine.setenv("PATH", str(java(tmp_path / "path", "17.0.1") / "bin"))
    machine.setenv("JAVA_HOME", str(tmp_path / "gone"))
    with pytest.raises(JavaUnusable, match=r"JAVA_HOME is .*gone: it has no bin/java"):
        find_java()


def test_an_old_java_is_refused_with_the_version_found(machine, tmp_path):
    machine.setenv("JAVA_HOME", str(java(tmp_path, "11.0.22")))
    with pytest.raises(JavaUnusable, match="its version is 11") as refused:
        find_java()
    assert str(tmp_path) in str(refused.value)


def test_a_java_that_fails_is_refused_with_its_first_words(machine, tmp_path):
    """Some systems have a ``java`` that only says where to get Java."""
    machine.setenv("JAVA_HOME", str(java(tmp_path, "17.0.1", status=1)))
    with pytest.raises(JavaUnusable, match="it does not print its version"):
        find_java()


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

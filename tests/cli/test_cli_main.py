from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from sapwood import __version__
from sapwood.cli import main as main_module
from sapwood.cli.main import main
from sapwood.errors import RunFolderError
from tests.cli.helpers import environment, sapwood

VERBS = ("run", "fork", "runs", "trace", "ckpt", "data", "doctor", "completion", "demo")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        [],
        ["run", "--help"],
        ["fork", "--help"],
        ["trace", "--help"],
        ["ckpt", "--help"],
        ["completion", "bash"],
    ],
)
def test_help_does_not_import_torch(tmp_path, arguments):
    code = (
        "import json, sys\n"
        "from sapwood.cli.main import main\n"
        f"code = main({arguments!r})\n"
        "print(json.dumps([code, 'torch' in sys.modules]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == [0, False]


def test_the_list_of_verbs_has_a_summary_for_each(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"│ {verb} " in text for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_each_verb_teaches_with_examples(verb, capsys):
    assert main([verb, "--help"]) == 0
    text = capsys.readouterr().out
    assert text.count(f"sapwood {verb}") >= 3
    assert "--help" in text or len(text.splitlines()) > 12


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_verbs_options_and_choices(shell, capsys):
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    for word in (*VERBS, "prune", "--restarts", "--at-step", "deepclone", "mooncake"):
        assert word.lstrip("-") in text
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=text, text=True, check=True, timeout=60)


def test_bash_completes_what_was_begun(tmp_path, capsys):
    if shutil.which("bash") is None:
        pytest.skip("there is no bash here")
    assert main(["completion", "bash"]) == 0
    asked = """
        COMP_WORDS=(sapwood fork x --approach d) COMP_CWORD=4 COMP_LINE="${COMP_WORDS[*]}"
        _sapwood; echo "${COMPREPLY[@]}"
        COMP_WORDS=(sapwood comp) COMP_CWORD=1 COMP_LINE="${COMP_WORDS[*]}"
        _sapwood; echo "${COMPREPLY[@]}"
    """
    done = subprocess.run(
        ["bash", "-c", capsys.readouterr().out + asked],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.split() == ["deepclone", "completion"], done.stderr


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == __version__


@pytest.mark.parametrize(
    "arguments", [["bogus"], ["trace"], ["runs", "--bogus"], ["run"], ["completion", "csh"]]
)
def test_misuse_is_exit_code_two(arguments, capsys):
    assert main(arguments) == 2
    assert capsys.readouterr().err


def test_our_errors_are_one_line_unless_asked(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SAPWOOD_DEBUG", raising=False)
    assert main(["runs", "nowhere"]) == 1
    assert capsys.readouterr().err.startswith("sapwood: there is no folder nowhere here")
    with pytest.raises(RunFolderError):
        main(["--debug", "runs", "nowhere"])
    monkeypatch.setenv("SAPWOOD_DEBUG", "1")
    with pytest.raises(RunFolderError):
        main(["runs", "nowhere"])


def test_without_cyclopts_the_exact_command_to_install_it_is_shown(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "cyclopts", None)
    assert main(["--help"]) == 2
    assert "pip install 'sapwood[cli]'" in capsys.readouterr().err


def test_an_interrupt_is_exit_code_130(monkeypatch):
    def interrupted(tokens):
        raise KeyboardInterrupt

    monkeypatch.setattr(main_module, "_call", interrupted)
    assert main([]) == 130


def test_a_reader_that_leaves_early_is_no_error(tmp_path):
    command = f"{sys.executable} -m sapwood.cli --help | true"
    done = subprocess.run(
        ["/bin/sh", "-c", command],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "Traceback" not in done.stderr


def test_python_dash_m_works(tmp_path):
    assert sapwood("--version", tmp_path=tmp_path).stdout.strip() == __version__


def test_the_package_is_the_command(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "sapwood", "--version"],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, __version__), done.stderr

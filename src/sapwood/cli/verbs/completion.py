"""``sapwood completion``."""

from __future__ import annotations

from typing import Literal

__all__ = ["completion"]

Shell = Literal["bash", "zsh", "fish"]


def completion(shell: Shell, /) -> None:
    """Print what makes the Tab key complete verbs, options and their choices in a shell.

    Nothing is installed: have your shell read it, each time it starts or from a file it looks for.

    ```
    sapwood completion bash >> ~/.bashrc
    sapwood completion bash > ~/.local/share/bash-completion/completions/sapwood
    sapwood completion zsh > ~/.zfunc/_sapwood        a folder of your fpath, before compinit
    sapwood completion fish > ~/.config/fish/completions/sapwood.fish
    ```

    Args:
        shell: The shell it is for.
    """
    from sapwood.cli.main import make_app

    print(make_app(listing=True).generate_completion(prog_name="sapwood", shell=shell))

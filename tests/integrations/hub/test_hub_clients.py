"""transformers and huggingface_hub load from a repository, in a process with HF_ENDPOINT set."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("starlette", reason="pip install 'sapwood[web]'")
pytest.importorskip("uvicorn", reason="pip install 'sapwood[web]'")

from sapwood.integrations.hub import HubServer
from sapwood.store import Repository
from sapwood.store import open as open_repository
from sapwood.store.exchange import read_model
from tests.cli.helpers import environment

transformers = pytest.importorskip("transformers", reason="pip install transformers")

TOKEN = "0123456789abcdef0123"
CLIENT = Path(__file__).with_name("hub_client.py")
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
}


def total(model: torch.nn.Module) -> str:
    return repr(sum(tensor.double().sum().item() for tensor in model.state_dict().values()))


def put(repo: Repository, folder: Path, name: str, **more: Any) -> None:
    found = read_model(folder)
    repo.save(found.value, name, note=found.note, files=found.files, **more)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, Any], Any]]:
    """What the client saw, and what there was to see."""
    folder = tmp_path_factory.mktemp("clients")
    torch.manual_seed(0)
    llamas = [
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, num_key_value_heads=2))
        for _ in range(2)
    ]
    bert = transformers.BertForMaskedLM(transformers.BertConfig(**SMALL))
    llamas[0].save_pretrained(folder / "llama1", max_shard_size="30KB")
    llamas[1].save_pretrained(folder / "llama2")
    bert.save_pretrained(folder / "bert")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"]
    (folder / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder / "bert")
    with open_repository(folder / "models") as repo:
        put(repo, folder / "llama1", "nt3/llama@1", tags=["old"])
        put(repo, folder / "llama2", "nt3/llama@2", parent="nt3/llama@1")
        put(repo, folder / "bert", "bert@1", tags=["best"])
        repo.save(bert, "saved@1")  # a module, with nothing beside it
        with HubServer(repo) as server, HubServer(repo, token=TOKEN) as private:
            done = subprocess.run(
                [sys.executable, str(CLIENT), private.url, TOKEN],
                env=environment(
                    folder,
                    HF_ENDPOINT=server.url,
                    HF_HOME=str(folder / "home"),
                    HF_HUB_DISABLE_TELEMETRY="1",
                    HF_HUB_DISABLE_XET="1",
                    NO_PROXY="*",
                ),
                capture_output=True,
                text=True,
                timeout=100,
                check=False,
            )
        assert done.returncode == 0, done.stderr
        index = json.loads((folder / "llama1/model.safetensors.index.json").read_text())
        yield json.loads(done.stdout.splitlines()[-1]), (llamas, bert, index)


def test_models_are_loaded_bit_for_bit(seen: tuple[dict[str, Any], Any]) -> None:
    found, (llamas, bert, _) = seen
    assert found["llama"] == total(llamas[1])
    assert found["llama revision"] == total(llamas[0])
    assert found["bert"] == total(bert)
    assert found["tied"]


def test_a_model_that_was_saved_without_a_configuration_has_weights(
    seen: tuple[dict[str, Any], Any],
) -> None:
    found, (_, bert, _) = seen
    assert found["saved"] == total(bert)
    assert found["bare"] == sorted(bert.state_dict())


def test_files_and_shards_are_those_of_the_folder(seen: tuple[dict[str, Any], Any]) -> None:
    found, (_, _, index) = seen
    assert found["index"] == index
    assert "model.safetensors" in found["files"]
    assert "config.json" in found["files"]
    assert found["tokens"] == [2, 6, 5, 6, 3]
    assert found["paths"] == ["config.json"]
    assert found["exists"] == [True, False]
    assert "nt3/llama/config.json" in found["folder"]


def test_ranges_give_single_tensors(seen: tuple[dict[str, Any], Any]) -> None:
    found, (llamas, _, _) = seen
    assert found["part"]
    assert found["parameters"] == {"F32": sum(p.numel() for p in llamas[1].parameters())}


def test_what_there_is(seen: tuple[dict[str, Any], Any]) -> None:
    assert seen[0]["listed"] == ["bert", "nt3/llama", "saved"]
    assert sorted(seen[0]["refs"]) == ["1", "2", "old"]


def test_refusals_are_those_of_the_hub(seen: tuple[dict[str, Any], Any]) -> None:
    assert seen[0]["refusals"][:4] == [
        "RemoteEntryNotFoundError",
        "RevisionNotFoundError",
        "RepositoryNotFoundError",
        "RepositoryNotFoundError",
    ]
    assert seen[0]["refusals"][4]
    assert seen[0]["without token"] == "RepositoryNotFoundError"
    assert seen[0]["wrong token"] == "HfHubHTTPError"
    assert seen[0]["with token"] == "bert"

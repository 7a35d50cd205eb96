"""A program of somebody who knows nothing of Sapwood: only HF_ENDPOINT points to it.

Prints one JSON object of what it saw.
"""

import json
import sys
from pathlib import Path

import huggingface_hub as hub
import torch
from huggingface_hub.utils import disable_progress_bars
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

disable_progress_bars()


def total(model: torch.nn.Module) -> str:
    return repr(sum(tensor.double().sum().item() for tensor in model.state_dict().values()))


def refusal(call) -> str:
    try:
        call()
    except Exception as error:  # whatever a client makes of an answer
        return type(error).__name__
    return ""


def main(private: str, token: str) -> None:
    seen = {}
    llama = AutoModelForCausalLM.from_pretrained("nt3/llama")
    seen["llama"] = total(llama)
    seen["llama revision"] = total(AutoModelForCausalLM.from_pretrained("nt3/llama", revision="1"))
    bert = AutoModelForMaskedLM.from_pretrained("bert", revision="best")
    seen["bert"] = total(bert)
    tied = bert.get_output_embeddings().weight is bert.get_input_embeddings().weight
    seen["tied"] = tied
    seen["saved"] = total(
        AutoModelForMaskedLM.from_pretrained("saved", config=AutoConfig.from_pretrained("bert"))
    )
    seen["tokens"] = AutoTokenizer.from_pretrained("bert")("b a b")["input_ids"]
    seen["files"] = hub.list_repo_files("nt3/llama")
    folder = hub.snapshot_download("nt3/llama", revision="1")
    seen["index"] = json.loads(Path(folder, "model.safetensors.index.json").read_text())
    with safe_open(hub.hf_hub_download("saved", "model.safetensors"), "pt") as file:
        seen["bare"] = sorted(file.keys())
    files = hub.HfFileSystem()
    with files.open("sapwood/bert/model.safetensors", "rb", block_size=512) as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
        low, high = header["bert.embeddings.word_embeddings.weight"]["data_offsets"]
        opened.seek(8 + length + low)
        part = torch.frombuffer(bytearray(opened.read(high - low)), dtype=torch.float32)
    seen["part"] = torch.equal(part, bert.get_input_embeddings().weight.detach().reshape(-1))
    seen["folder"] = files.ls("nt3/llama", detail=False)
    seen["parameters"] = hub.get_safetensors_metadata("nt3/llama").parameter_count
    seen["refs"] = [ref.name for ref in hub.list_repo_refs("nt3/llama").tags]
    seen["listed"] = sorted(model.id for model in hub.list_models())
    info = hub.get_paths_info("nt3/llama", ["config.json", "nothing"])
    seen["paths"] = [one.path for one in info]
    seen["exists"] = [hub.file_exists("bert", "config.json"), hub.file_exists("bert", "x")]
    seen["refusals"] = [
        refusal(lambda: hub.hf_hub_download("bert", "nothing.json")),
        refusal(lambda: hub.hf_hub_download("bert", "config.json", revision="9")),
        refusal(lambda: hub.hf_hub_download("nobody", "config.json")),
        refusal(lambda: hub.snapshot_download("nobody")),
        refusal(lambda: hub.upload_file(path_or_fileobj=b"x", path_in_repo="x", repo_id="bert")),
    ]
    locked = hub.HfApi(endpoint=private)
    seen["without token"] = refusal(lambda: locked.model_info("bert"))
    seen["wrong token"] = refusal(lambda: locked.model_info("bert", token="x" * 20))
    seen["with token"] = locked.model_info("bert", token=token).id
    print(json.dumps(seen))


main(*sys.argv[1:])

"""What SGLang 0.5.23's HTTP server says to the calls that Shardwise makes, as its sources define it: arguments, keys,
JSON forms, and the order of sampling and logprobs. The numbers are those of the embedded engine, on the CPU.

With SGLANG_STUB_JOURNAL it writes down the calls, and the arguments it was started with, one JSON object a line.
"""

import argparse
import hashlib
import json
import mmap
import os
import sys
import tempfile
import threading
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from shardwise.recipes.rank.heavy_imports import heavy_imports

with heavy_imports():
    import torch
    import yaml
    from safetensors.torch import load_file
    from transformers import AutoTokenizer

    from shardwise.rollout import EmbeddedEngine
    from shardwise.types import GenerateRequest

CPU = torch.device("cpu")
FLAGS = [
    *("--skip-tokenizer-init", "--enable-deterministic-inference", "--disable-radix-cache", "--enable-memory-saver"),
    *("--enable-weights-cpu-backup", "--sleep-on-idle"),
]
OPTIONS = {
    **dict.fromkeys(("--model-path", "--host", "--api-key", "--admin-api-key", "--weight-version"), str),
    **dict.fromkeys(("--port", "--max-running-requests", "--tp-size", "--base-gpu-id", "--context-length"), int),
    **dict.fromkeys(("--log-level", "--attention-backend"), str),
    "--mem-fraction-static": float,
}
GREEDY_BELOW = 1e-6


def parse(argv):
    """As SGLang's ConfigArgumentMerger: the file's keys become options, true a flag, false nothing."""
    file = Path(argv[argv.index("--config") + 1])
    parser = argparse.ArgumentParser(prog="launch_server.py", allow_abbrev=False)
    for flag in FLAGS:
        parser.add_argument(flag, action="store_true")
    for option, kind in OPTIONS.items():
        parser.add_argument(option, type=kind)
    parser.add_argument("--dtype", choices=["auto", "half", "float16", "bfloat16", "float", "float32"])
    words = []
    for key, value in yaml.safe_load(file.read_text()).items():
        if isinstance(value, bool) and f"--{key}" in FLAGS:
            words += [f"--{key}"] if value else []
        else:
            words += [f"--{key}", str(value)]
    note({"argv": sys.argv[1:], "mode": file.parent.stat().st_mode & 0o777, "arguments": words})
    return parser.parse_args(words)


def note(event):
    if path := os.environ.get("SGLANG_STUB_JOURNAL"):
        with open(path, "a") as journal:
            journal.write(json.dumps(event) + "\n")


class Refused(Exception):
    """Answered with status 400."""


class Stub:
    def __init__(self, args):
        torch.set_num_threads(1)
        self.args, self.version, self.released = args, args.weight_version, set()
        self.lock = threading.Lock()
        self.decode = None
        if not args.skip_tokenizer_init:
            self.decode = AutoTokenizer.from_pretrained(args.model_path).decode
        dtype = getattr(torch, args.dtype)
        rows = args.max_running_requests
        engine = EmbeddedEngine.from_folder(Path(args.model_path), dtype=dtype, max_rows=rows, device=CPU)
        self.model = engine._model
        self.context = args.context_length or self.model.config.max_position_embeddings

    def engine(self, stop_token_ids):
        """Stop tokens are of a request there and of the engine here."""
        return EmbeddedEngine(
            self.model,
            max_rows=self.args.max_running_requests,
            device=CPU,
            stop_token_ids=stop_token_ids or (),
            decode=self.decode,
        )

    def generate(self, body):
        if self.released:
            raise Refused("the memory has been released")
        assert body["return_logprob"] is True
        assert self.args.enable_deterministic_inference, "else seeds would be ignored"
        prompts, params = body["input_ids"], body["sampling_params"]
        (stop_token_ids,) = {tuple(each.get("stop_token_ids") or ()) for each in params}
        engine = self.engine(stop_token_ids)
        requests = [self.request(*pair) for pair in zip(prompts, params, strict=True)]
        drawn = iter(engine.generate([request for request in requests if request.max_tokens]))
        scores = engine.logprobs(prompts) if body["logprob_start_len"] == 0 else [[]] * len(prompts)
        return [
            self.answer(request, next(drawn)[0] if request.max_tokens else None, score)
            for request, score in zip(requests, scores, strict=True)
        ]

    def request(self, prompt, params):
        if len(prompt) + params["max_new_tokens"] > self.context:
            raise Refused(f"Requested token count exceeds the model's maximum context length of {self.context} tokens.")
        params = {"top_k": -1, "top_p": 1.0, "sampling_seed": 42, "stop": None, **params}
        assert not params.keys() & {"min_p", "logit_bias", "ignore_eos"}, "not in the deterministic mode, or not so"
        greedy = params["temperature"] < GREEDY_BELOW
        return GenerateRequest(
            uid="",
            prompt_ids=prompt,
            max_tokens=max(0, min(params["max_new_tokens"], self.context - len(prompt) - 2)),  # it says nothing of it
            temperature=0.0 if greedy else params["temperature"],
            top_k=0 if params["top_k"] == -1 else params["top_k"],
            top_p=params["top_p"],
            stop=params["stop"] or [],
            seed=params["sampling_seed"],
        )

    def answer(self, request, found, scores):
        outputs = list(zip(found.logprobs, found.token_ids, strict=True)) if found else []
        reason = {"type": "length", "length": request.max_tokens}
        if found and found.finish_reason == "stop":
            reason = {"type": "stop", "matched": found.token_ids[-1]}
        meta = {
            "id": "0",
            "finish_reason": reason,
            "prompt_tokens": len(request.prompt_ids),
            "weight_version": self.version,
            "input_token_logprobs": [
                [score, token, None] for score, token in zip([None, *scores], request.prompt_ids, strict=False)
            ],
            "output_token_logprobs": [[*entry, None] for entry in outputs],
        }
        return {"text": "", "output_ids": [token for _, token in outputs], "meta_info": meta}

    @torch.no_grad()
    def update_weights_from_disk(self, body):
        if body["load_format"] != "safetensors":
            raise Refused("this stub reads nothing else")
        served = self.model.state_dict()
        for file in sorted(Path(body["model_path"]).glob("*.safetensors")):
            for name, tensor in load_file(file).items():
                served[name].copy_(tensor)
        return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    def update_weight_version(self, body):
        self.version = body["new_version"]
        return {"success": True, "message": "", "new_version": self.version}

    @torch.no_grad()
    def release_memory_occupation(self, body):
        if not self.args.enable_memory_saver:
            raise Refused("no memory saver")
        self.released |= set(body["tags"])
        if "weights" in body["tags"] and not self.args.enable_weights_cpu_backup:
            for parameter in self.model.parameters():
                parameter.fill_(torch.nan)

    def resume_memory_occupation(self, body):
        self.released -= set(body["tags"])


def handler(stub):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            """Without a key, and while it generates, as SGLang: at least a second after the question."""
            assert self.path == "/health"
            time.sleep(0.1)
            self.reply(200, b"")

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            key = stub.args.api_key if self.path == "/generate" else stub.args.admin_api_key
            if self.headers["Authorization"] != f"Bearer {key}":
                return self.reply(401, b'{"error":"Unauthorized"}')
            note({"path": self.path, "body": body})
            try:
                with stub.lock:
                    answer = getattr(stub, self.path.removeprefix("/"))(body)
            except Refused as error:
                return self.reply(400, json.dumps({"error": {"message": str(error)}}).encode())
            content = b"" if answer is None else json.dumps(answer).replace("NaN", "null").encode()  # as orjson has it
            return self.reply(200, content)

        def reply(self, status, content):
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    return Handler


def leave_names():
    """Makes what SGLang's processes find each other by and never remove: shared memory, which is returned, and a
    socket."""
    instance = uuid.uuid4().hex[:12]
    digest = hashlib.blake2s(instance.encode(), digest_size=4).hexdigest()
    loads = Path(f"/dev/shm/sglang_loads_{instance}_{digest}.shm")
    with loads.open("w+b") as file:
        file.truncate(1 << 14)
        memory = mmap.mmap(file.fileno(), 0)
    with tempfile.NamedTemporaryFile(delete=False) as socket:
        note({"left": [str(loads), socket.name]})
    return memory


def main():
    args = parse(sys.argv[1:])
    _memory = leave_names()
    server = ThreadingHTTPServer((args.host, args.port), handler(Stub(args)))
    server.daemon_threads = True
    server.serve_forever()


if __name__ == "__main__":
    main()

"""`python -m sglang_patches.launch.demo_page`: serves the page on loopback, in front of two SGLang servers on loopback."""

import argparse
from pathlib import Path

import uvicorn
from tokenizers import Tokenizer

from sglang_patches.launch.demo_page.answers import Server
from sglang_patches.launch.demo_page.application import application
from sglang_patches.launch.serve import HOST

STOP_SECONDS = 1  # for answers that are being read when it is told to end


def main() -> None:
    parser = argparse.ArgumentParser(prog="demo_page", description=__doc__)
    parser.add_argument("--port", type=int, required=True, help="of the page")
    parser.add_argument("--model", required=True, help="folder or name")
    parser.add_argument("--tokenizer", type=Path, required=True, help="the model's tokenizer.json")
    parser.add_argument("--method", required=True, help="its name")
    parser.add_argument("--plain-port", type=int, required=True, help="of the server with plain decoding")
    parser.add_argument("--method-port", type=int, required=True, help="of the server with the method")
    words = parser.parse_args()
    app = application(
        words.model,
        plain=Server("plain decoding", f"http://{HOST}:{words.plain_port}", drafts=False),
        method=Server(words.method, f"http://{HOST}:{words.method_port}", drafts=True),
        tokenizer=Tokenizer.from_file(str(words.tokenizer)),
    )
    uvicorn.run(app, host=HOST, port=words.port, log_level="warning", timeout_graceful_shutdown=STOP_SECONDS)


if __name__ == "__main__":
    main()

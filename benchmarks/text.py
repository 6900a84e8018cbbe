"""Texts per second of each engine and precision of this machine, against peers in the same run.

    python benchmarks/text.py [--runs 5] [--batches 1 32 256] [--captions FILE] [--peer PYTHON]

All run CLIP B/32's text tower with the same random weights and OpenAI's vocabulary, interleaved,
from strings to unit rows. Each is in a process of its own, so that thread pools do not compete:

  openvino, torch        the exported model in mlcd.encoders, in fp32 and, where the CPU has it,
                         bf16
  transformers           CLIPTextModelWithProjection, eager attention, fp32, padded to the longest
  sentence-transformers  its CLIPModel, fp32, where it is installed: in this environment, or in that
                         of --peer, an interpreter whose environment has mlcd as well
  gemm                   the tower's widest matrix product by torch and openvino; the larger is the
                         limit

The share of the limit counts the tokens that the texts have, without padding.
"""

import argparse
import gzip
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from encode import GEMM_BATCH, GEMMS, GIGA, PAUSE_S, available, gemm

from mlcd.cores import available_cores, cpu_features

ROOT = Path(__file__).resolve().parents[1]
CAPTIONS = ROOT.parent / "shared/data/coco_multi_captions/labels.jsonl"
CONTEXT, WIDTH, DEPTH, MLP, DIMENSION, VOCABULARY = 77, 512, 12, 2048, 512, 49408
ENGINES = (
    "openvino-fp32",
    "openvino-bf16",
    "torch-fp32",
    "torch-bf16",
    "transformers-fp32",
    "sentence_transformers-fp32",
)
BASE = "transformers-fp32"
THEIRS, OURS = "theirs", "ours"
GEMM_SIZES = SimpleNamespace(num_tokens=16, width=WIDTH, mlp_width=MLP)
MOST_TEXTS = 256

Rows = np.ndarray
Encode = Callable[[list[str]], Rows]


def flops(lengths: Sequence[int]) -> int:
    """Returns the multiplications and additions of every matrix product, of texts of so many
    tokens.
    """
    tokens, squares = sum(lengths), sum(length**2 for length in lengths)
    products = 2 * tokens * WIDTH * (4 * WIDTH + 2 * MLP)
    attention = 2 * 2 * squares * WIDTH
    return DEPTH * (products + attention) + len(lengths) * 2 * WIDTH * DIMENSION


def write_model(folder: Path) -> None:
    """Writes a CLIP of random weights with a tiny image tower, and exports it."""
    import torch
    from transformers import CLIPConfig, CLIPModel, CLIPTokenizer

    from mlcd.export.model_artifact import export_model
    from mlcd.models.configs import clip_preprocessing, write_hf_preprocessing
    from mlcd.progress import Reporter

    torch.manual_seed(0)
    ends = {"bos_token_id": VOCABULARY - 2, "eos_token_id": VOCABULARY - 1}
    config = CLIPConfig(
        text_config={"pad_token_id": VOCABULARY - 1, **ends},
        vision_config={
            "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1,
            "intermediate_size": 64, "image_size": 32, "patch_size": 32,
        },
    )  # fmt: skip
    CLIPModel(config).save_pretrained(folder / THEIRS)
    merges = openai_merges()
    tokenizer = CLIPTokenizer(vocab=openai_vocabulary(merges), merges=merges)
    tokenizer.model_max_length = CONTEXT
    tokenizer.save_pretrained(folder / THEIRS)
    (folder / THEIRS / "preprocessor_config.json").write_text(
        json.dumps(write_hf_preprocessing(clip_preprocessing(32)))
    )
    export_model(str(folder / THEIRS), folder / OURS, name="random", reporter=Reporter("silent"))


def openai_merges() -> list[tuple[str, ...]]:
    """Returns the merges of OpenAI's vocabulary, of the file that open_clip brings."""
    path = importlib.metadata.distribution("open_clip_torch").locate_file(
        "open_clip/bpe_simple_vocab_16e6.txt.gz"
    )
    with gzip.open(str(path), "rt", encoding="utf-8") as file:
        lines = file.read().split("\n")
    return [tuple(line.split()) for line in lines[1 : VOCABULARY - 2 * 256 - 2 + 1]]


def openai_vocabulary(merges: list[tuple[str, ...]]) -> dict[str, int]:
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda one: (ord(one) > 255, one))
    words = [*letters, *(f"{each}</w>" for each in letters), *("".join(pair) for pair in merges)]
    return {
        word: number for number, word in enumerate([*words, "<|startoftext|>", "<|endoftext|>"])
    }


def ours(engine: Any, precision: Any, folder: Path) -> Encode:
    from mlcd.encoders import open_text_encoder
    from mlcd.encoders.options import EncoderOptions

    encoder = open_text_encoder(
        str(folder / OURS), EncoderOptions(engine=engine, precision=precision)
    )
    return lambda texts: encoder.encode(encoder.tokenizer(texts))


def transformers(folder: Path) -> Encode:
    import torch
    from transformers import AutoTokenizer, CLIPTextModelWithProjection

    model = CLIPTextModelWithProjection.from_pretrained(
        folder / THEIRS, attn_implementation="eager"
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / THEIRS)
    torch.set_num_threads(available_cores())

    def encode(texts: list[str]) -> Rows:
        found = []
        for start in range(0, len(texts), 32):
            ids = tokenizer(
                texts[start : start + 32],
                padding=True,
                truncation=True,
                max_length=CONTEXT,
                return_tensors="pt",
            )
            with torch.inference_mode():
                rows = model(**ids).text_embeds
                found.append(torch.nn.functional.normalize(rows, dim=1).numpy())
        return np.concatenate(found)

    return encode


def sentence_transformers(folder: Path) -> Encode:
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import CLIPModel

    model = SentenceTransformer(modules=[CLIPModel(str(folder / THEIRS))], device="cpu")
    torch.set_num_threads(available_cores())
    return lambda texts: np.asarray(
        model.encode(texts, batch_size=32, normalize_embeddings=True, show_progress_bar=False)
    )


def work(form: str, folder: Path) -> None:
    """Answers requests on standard input with JSON lines; it runs in a process of its own."""
    *_, engine, precision = form.split("-")
    texts = json.loads((folder / "texts.json").read_text())
    if form.startswith("gemm"):
        product = gemm(engine, precision, GEMM_SIZES)  # type: ignore[arg-type]
        run: Callable[[int], object] = lambda _: product()  # noqa: E731
    else:
        peers = {"transformers": transformers, "sentence_transformers": sentence_transformers}
        encode = peers[engine](folder) if engine in peers else ours(engine, precision, folder)
        np.save(folder / f"{form}.npy", encode(texts))
        run = lambda num: encode(texts[:num])  # noqa: E731
    print(json.dumps({"seconds": 0}), flush=True)
    for line in sys.stdin:
        started = time.perf_counter()
        run(json.loads(line))
        print(json.dumps({"seconds": time.perf_counter() - started}), flush=True)


class Worker:
    """A process that runs `work`."""

    def __init__(self, form: str, folder: Path, python: str) -> None:
        command = [python, __file__, "--form", form, "--folder", str(folder)]
        self.form = form
        # what peers print on standard error is not part of the answer
        self._process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": str(ROOT)},  # noqa: TID251 - a child's
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if "transformers" in form else None,
            text=True,
        )
        self._answer()

    def ask(self, num: int) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(num) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        self._process.communicate()

    def _answer(self) -> float:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith('{"seconds"'):
                return float(json.loads(line)["seconds"])
        raise SystemExit(f"{self.form} ended")


def read_captions(path: Path) -> list[str]:
    """Returns real captions, each once, in the order of the file."""
    if not path.is_file():
        from mlcd.export.parity import CAPTIONS as SHIPPED

        print(f"{path} is not there: the captions are those that mlcd ships")
        return SHIPPED.read_text(encoding="utf-8").splitlines() * 8
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return list(dict.fromkeys(caption for row in rows for caption in row["captions"]))


def token_lengths(folder: Path, texts: list[str]) -> list[int]:
    from mlcd.artifacts.manifest import open_artifact
    from mlcd.encoders.local_text import open_text_part
    from mlcd.encoders.token_batches import TokenBatches

    part = open_text_part(open_artifact(folder / OURS, "model", verify_files=False))
    lengths: list[int] = (
        TokenBatches(part.settings, part.tokenizer).lengths(part.tokenizer(texts)).tolist()
    )
    return lengths


def measure(
    workers: list[Worker], limits: list[Worker], batches: list[int], runs: int
) -> dict[tuple[str, int], list[float]]:
    seconds: dict[tuple[str, int], list[float]] = {}
    # The first run warms up every shape.
    for run in range(-1, runs):
        for num in batches:
            for worker in workers:
                time.sleep(PAUSE_S)
                taken = worker.ask(num)
                seconds.setdefault((worker.form, num), []).extend([taken] if run >= 0 else [])
        for worker in limits:
            time.sleep(PAUSE_S)
            middle = statistics.median(worker.ask(0) for _ in range(20))
            seconds.setdefault((worker.form, 0), []).extend([middle] if run >= 0 else [])
    return seconds


def report(
    seconds: dict[tuple[str, int], list[float]], forms: list[str], lengths: list[int]
) -> None:
    work_done = 2 * GEMM_BATCH * GEMM_SIZES.num_tokens * WIDTH * MLP
    limit: dict[str, float] = {}
    for (form, num), times in seconds.items():
        if num == 0:
            rate = work_done / statistics.median(times)
            print(f"  {form:28} {rate / GIGA:6.1f} GFLOP/s")
            precision = form.rpartition("-")[2]
            limit[precision] = max(limit.get(precision, 0.0), rate)
    for num in sorted({num for _, num in seconds if num}):
        base = seconds[BASE, num]
        total = flops(lengths[:num])
        print(f"{num} texts of {sum(lengths[:num])} tokens, {total / GIGA:.2f} GFLOP")
        for form in forms:
            times = seconds[form, num]
            middle = statistics.median(times)
            ratio = statistics.median(theirs / own for theirs, own in zip(base, times, strict=True))
            share = total / middle / limit[form.rpartition("-")[2]]
            print(
                f"  {form:28} {num / middle:7.1f} texts/s, {1e3 * middle:7.1f} ms"
                f" ({1e3 * min(times):.1f} to {1e3 * max(times):.1f}), {ratio:4.2f}x transformers,"
                f" {share:4.0%} of the GEMM limit"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, MOST_TEXTS])
    parser.add_argument("--captions", type=Path, default=CAPTIONS)
    parser.add_argument("--peer", help="Python with sentence-transformers", default=sys.executable)
    parser.add_argument("--form", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.form:
        work(options.form, options.folder)
        return
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    print(
        f"{available_cores()} cores, {', '.join(sorted(cpu_features()))}; load before the run"
        f" {os.getloadavg()[0]:.1f}"
    )
    forms = available(ENGINES)
    check = [options.peer, "-c", "import sentence_transformers"]
    if subprocess.run(check, capture_output=True, check=False).returncode:
        print("sentence-transformers is not installed: it is left out")
        forms.remove("sentence_transformers-fp32")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = read_captions(options.captions)[: max(options.batches)]
        (folder / "texts.json").write_text(json.dumps(texts))
        write_model(folder)
        lengths = token_lengths(folder, texts)
        print(
            f"{len(texts)} captions, {min(lengths)} to {max(lengths)} tokens, mean"
            f" {statistics.mean(lengths):.1f}"
        )
        workers = [
            Worker(form, folder, options.peer if "sentence" in form else sys.executable)
            for form in forms
        ]
        limits = [Worker(form, folder, sys.executable) for form in available(GEMMS)]
        seconds = measure(workers, limits, options.batches, options.runs)
        report(seconds, forms, lengths)
        exact = np.load(folder / f"{BASE}.npy").astype(np.float64)
        for form in forms:
            cosine = (np.load(folder / f"{form}.npy") * exact).sum(axis=1).min()
            print(f"  {form:28} cosine to {BASE} >= {cosine:.7f}")
        for worker in (*workers, *limits):
            worker.close()


if __name__ == "__main__":
    main()

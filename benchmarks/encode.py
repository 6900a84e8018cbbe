"""Images per second of every engine and precision of this machine, against peers in the same run.

    python benchmarks/encode.py [--tower b32|l14] [--batches 1 8 32] [--runs 5] [--images DIR]

All run one ViT with the same random weights, interleaved. Each is in a process of its own, so that
thread pools do not compete:

  openvino, torch       mlcd.encoders, in fp32 and, where the CPU has it, bf16
  transformers          CLIPVisionModelWithProjection, eager attention, fp32
  onnxruntime           the exported graph, fp32
  gemm                  the tower's widest matrix product by torch and openvino; the larger is the
                        limit

Then it prints, on real images, the cosine to torch fp32, and whether batch size and neighbors
change an embedding or its nearest of 1,000 random centers.

`benchmarks/encode_device.py` measures the engine torch alone, on a GPU.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mlcd.cores import available_cores, cpu_features
from mlcd.images.sources import open_source
from mlcd.images.transform import PreprocessSpec

# encode brings torch, which would count as memory of the other engines.
if TYPE_CHECKING:
    from mlcd.models.servable import Servable
    from mlcd.models.vit import ViTConfig

COMMON = {"image_size": 224, "activation": "quick_gelu"}
TOWERS: dict[str, dict[str, Any]] = {
    "tiny": {
        "image_size": 32,
        "patch_size": 16,
        "width": 64,
        "depth": 2,
        "heads": 2,
        "mlp_width": 128,
        "embedding_dim": 32,
    },
    "b32": COMMON
    | {
        "patch_size": 32,
        "width": 768,
        "depth": 12,
        "heads": 12,
        "mlp_width": 3072,
        "embedding_dim": 512,
    },
    "l14": COMMON
    | {
        "patch_size": 14,
        "width": 1024,
        "depth": 24,
        "heads": 16,
        "mlp_width": 4096,
        "embedding_dim": 768,
    },
}
ENGINES = (
    "openvino-fp32",
    "openvino-bf16",
    "torch-fp32",
    "torch-bf16",
    "transformers-fp32",
    "onnxruntime-fp32",
)
GEMMS = ("gemm-torch-fp32", "gemm-openvino-fp32", "gemm-torch-bf16", "gemm-openvino-bf16")
BASE, EXACT = "transformers-fp32", "torch-fp32"
BATCH_SIZES = (1, 3, 8, 20, 32)
NUM_CENTERS, TOP, GEMM_BATCH = 1000, 8, 32
PAUSE_S = 0.3  # threads of the last engine may spin for a while, waiting for more
CALTECH = Path(__file__).resolve().parents[2] / "shared" / "data" / "caltech101_20"
ONNX, IMAGES = "model.onnx", "images.npy"
MIB, GIGA = 2**20, 1e9

Rows = NDArray[np.float32]
Encode = Callable[[NDArray[np.uint8]], Rows]


def tower_config(tower: str) -> "ViTConfig":
    from mlcd.models.vit import ViTConfig

    return ViTConfig(**TOWERS[tower])


def flops_per_image(config: "ViTConfig") -> int:
    """Returns the multiplications and additions of every matrix product; the rest is below one
    percent.
    """
    tokens, width = config.num_tokens, config.width
    patches = 2 * (tokens - 1) * 3 * config.patch_size**2 * width
    products = 2 * tokens * width * (3 * width + width + 2 * config.mlp_width)
    attention = 2 * 2 * tokens**2 * width
    return patches + config.depth * (products + attention) + 2 * width * config.output_dim


def random_model(config: "ViTConfig") -> "Servable":
    """Returns a tower of random weights, the same each time."""
    import torch

    from mlcd.models.servable import Servable
    from mlcd.models.vit import ViT

    trunk = ViT(config)
    trunk.initialize(torch.Generator().manual_seed(0))
    return Servable(
        trunk, PreprocessSpec(resize_shortest=config.image_size, crop=config.image_size)
    )


def write_model(config: "ViTConfig", folder: Path) -> None:
    """Writes one tower of random weights in every layout that an engine here reads."""
    from safetensors.torch import save_file

    from mlcd.export.graph import write_image_graph
    from mlcd.models.checkpoints import write_state
    from mlcd.models.configs import write_hf_config

    model = random_model(config)
    trunk = model.trunk
    model.write(folder)
    write_image_graph(model, model.preprocess.crop, folder / ONNX)
    (folder / "hf").mkdir()
    state = {
        name: tensor.contiguous() for name, tensor in write_state(trunk.state_dict(), "hf").items()
    }
    save_file(state, folder / "hf" / "model.safetensors", metadata={"format": "pt"})
    (folder / "hf" / "config.json").write_text(json.dumps(write_hf_config(config)))


def ours(engine: str, precision: Any, folder: Path) -> Encode:
    preprocess = PreprocessSpec.read(folder / "preprocess.json")
    named = {"name": "random", "fingerprint": "", "preprocess": preprocess, "precision": precision}
    if engine == "openvino":
        from mlcd.encoders.openvino import OpenVinoEncoder, read_onnx

        return OpenVinoEncoder(read_onnx(folder / ONNX), **named).encode
    from mlcd.encoders.torch import TorchEncoder
    from mlcd.models.servable import Servable

    return TorchEncoder(Servable.read(folder), **named).encode


def transformers(folder: Path) -> Encode:
    import torch
    from transformers import CLIPVisionModelWithProjection

    model = CLIPVisionModelWithProjection.from_pretrained(
        folder / "hf", attn_implementation="eager"
    ).eval()
    spec = PreprocessSpec.read(folder / "preprocess.json")
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (spec.mean, spec.std))
    torch.set_num_threads(available_cores())

    def encode(images: NDArray[np.uint8]) -> Rows:
        with torch.inference_mode():
            rows = model((torch.from_numpy(images) / 255.0 - mean) / std).image_embeds
            return torch.nn.functional.normalize(rows, dim=1).numpy()

    return encode


def onnxruntime(folder: Path) -> Encode:
    from onnxruntime import InferenceSession, SessionOptions

    options = SessionOptions()
    options.intra_op_num_threads = available_cores()
    session = InferenceSession(folder / ONNX, options, providers=["CPUExecutionProvider"])
    return lambda images: session.run(None, {"image_u8": images})[0]


def gemm(engine: str, precision: str, config: "ViTConfig") -> Callable[[], object]:
    """Returns a product of [batch x tokens, width] and [width, mlp_width], weights constant as in a
    model.
    """
    generator = np.random.default_rng(0)
    rows = generator.standard_normal((GEMM_BATCH * config.num_tokens, config.width)).astype(
        np.float32
    )
    weight = generator.standard_normal((config.mlp_width, config.width)).astype(np.float32)
    if engine == "torch":
        import torch

        torch.set_num_threads(available_cores())
        kind = torch.bfloat16 if precision == "bf16" else torch.float32
        left, right = torch.from_numpy(rows).to(kind), torch.from_numpy(weight).to(kind)
        return lambda: torch.nn.functional.linear(left, right)
    import openvino as ov
    from openvino import opset13 as op

    pixels = op.parameter([-1, config.width], ov.Type.f32)
    product = op.matmul(pixels, op.constant(weight), transpose_a=False, transpose_b=True)
    model = ov.Model([product], [pixels])
    kind = ov.Type.bf16 if precision == "bf16" else ov.Type.f32
    settings = {"INFERENCE_PRECISION_HINT": kind, "INFERENCE_NUM_THREADS": available_cores()}
    request = ov.Core().compile_model(model, "CPU", settings).create_infer_request()
    return lambda: request.infer([rows], share_inputs=True, share_outputs=True)


def work(form: str, tower: str, folder: Path) -> None:
    """Answers requests on standard input with JSON lines; it runs in a process of its own."""
    *_, engine, precision = form.split("-")
    started = time.perf_counter()
    if form.startswith("gemm"):
        product = gemm(engine, precision, tower_config(tower))
        run: Callable[[int], object] = lambda _: product()  # noqa: E731
    else:
        peers: dict[str, Callable[[Path], Encode]] = {
            "transformers": transformers,
            "onnxruntime": onnxruntime,
        }
        encode = peers[engine](folder) if engine in peers else ours(engine, precision, folder)
        images = np.load(folder / IMAGES)
        run = lambda num: encode(images[:num])  # noqa: E731
    run(1)
    print(json.dumps({"open_s": time.perf_counter() - started}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "order" in request:
            parts = [
                slice(*bounds)
                for bounds in pairwise([*range(0, len(images), request["size"]), len(images)])
            ]
            ordered = images[request["order"]]
            np.save(folder / "rows.npy", np.concatenate([encode(ordered[part]) for part in parts]))
        started = time.perf_counter()
        if "time" in request:
            run(request["time"])
        print(
            json.dumps({"seconds": time.perf_counter() - started, "peak_bytes": _peak_bytes()}),
            flush=True,
        )


def _peak_bytes() -> int:
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM")
    )
    return 1024 * int(line.split()[1])


class Worker:
    """A process that runs `work`."""

    def __init__(self, form: str, tower: str, folder: Path) -> None:
        command = [
            sys.executable,
            __file__,
            "--form",
            form,
            "--tower",
            tower,
            "--folder",
            str(folder),
        ]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.form, self._folder, self.peak_bytes = form, folder, 0
        self.open_s = self._answer()["open_s"]

    def ask(self, **request: Any) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        self.peak_bytes = int(answer["peak_bytes"])
        return answer["seconds"]

    def rows(self, size: int, order: NDArray[np.integer]) -> Rows:
        """Returns every image's row, encoded `size` at a time in this order, in the images' own
        order.
        """
        self.ask(size=size, order=order.tolist())
        rows: Rows = np.empty_like(encoded := np.load(self._folder / "rows.npy"))
        rows[order] = encoded
        return rows

    def close(self) -> None:
        self._process.communicate()

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        answer: dict[str, float] = json.loads(self._process.stdout.readline())
        return answer


def available(forms: tuple[str, ...]) -> list[str]:
    """Leaves out bf16 if the CPU has none: emulated, it is a hundred times slower."""
    has_bf16 = bool(cpu_features() & {"AVX512_BF16", "AMX_BF16"})
    return [form for form in forms if has_bf16 or not form.endswith("bf16")]


def compare_speed(workers: list[Worker], limits: list[Worker], options: argparse.Namespace) -> None:
    flops = flops_per_image(tower_config(options.tower))
    seconds: dict[tuple[str, int], list[float]] = {}
    # The first run warms up every batch size.
    for run in range(-1, options.runs):
        for num in options.batches:
            for worker in workers:
                time.sleep(PAUSE_S)
                taken = worker.ask(time=num)
                seconds.setdefault((worker.form, num), []).extend([taken] if run >= 0 else [])
        for worker in limits:
            time.sleep(PAUSE_S)
            middle = statistics.median(worker.ask(time=GEMM_BATCH) for _ in range(20))
            seconds.setdefault((worker.form, 0), []).extend([middle] if run >= 0 else [])
    limit = _print_limits(limits, seconds, tower_config(options.tower))
    print(
        f"\n{options.tower}: {flops / GIGA:.2f} GFLOP per image; ms per batch are medians (min to "
        "max)"
    )
    for num in options.batches:
        base = seconds[BASE, num]
        for worker in workers:
            times = seconds[worker.form, num]
            middle = statistics.median(times)
            ratio = statistics.median(theirs / own for theirs, own in zip(base, times, strict=True))
            share = num * flops / middle / limit[worker.form.rpartition("-")[2]]
            print(
                f"  batch {num:2} {worker.form:18} {num / middle:6.1f} images/s, "
                f"{1e3 * middle / num:6.1f} ms each,"
                f" {1e3 * middle:7.1f} ms ({1e3 * min(times):.1f} to {1e3 * max(times):.1f}),"
                f" {ratio:4.2f}x transformers, {share:4.0%} of the GEMM limit"
            )
    for worker in workers:
        print(
            f"  {worker.form:18} ready in {worker.open_s:4.1f} s, peak memory "
            f"{worker.peak_bytes / MIB:5.0f} MiB"
        )


def _print_limits(
    workers: list[Worker], seconds: dict[tuple[str, int], list[float]], config: "ViTConfig"
) -> dict[str, float]:
    flops = 2 * GEMM_BATCH * config.num_tokens * config.width * config.mlp_width
    limit: dict[str, float] = {}
    for worker in workers:
        rates = [flops / taken for taken in seconds[worker.form, 0]]
        print(
            f"  {worker.form:18} {statistics.median(rates) / GIGA:6.1f} GFLOP/s"
            f" ({min(rates) / GIGA:.1f} to {max(rates) / GIGA:.1f})"
        )
        precision = worker.form.rpartition("-")[2]
        limit[precision] = max(limit.get(precision, 0.0), statistics.median(rates))
    return limit


def compare_rows(workers: list[Worker], num_images: int) -> None:
    """Prints each engine's agreement with torch fp32, and with itself over batch sizes and
    neighbors.
    """
    random = np.random.default_rng(0)
    centers = random.standard_normal((NUM_CENTERS, _dimension(workers))).astype(np.float32)
    centers /= np.linalg.norm(centers, axis=1, keepdims=True)
    in_order = np.arange(num_images)
    exact = next(worker for worker in workers if worker.form == EXACT).rows(1, in_order)
    print(f"\n{num_images} images; labels: the nearest of {NUM_CENTERS} random centers")
    for worker in workers:
        alone = worker.rows(1, in_order)
        others = [
            worker.rows(size, order)
            for size in BATCH_SIZES[1:]
            for order in (random.permutation(num_images),)
        ]
        gap = max(float(np.abs(rows - alone).max()) for rows in others)
        first, eight = np.mean([agreement(alone, rows, centers) for rows in others], axis=0)
        cosine = float((alone.astype(np.float64) * exact).sum(axis=1).min())
        to_exact = agreement(exact, alone, centers)
        print(
            f"  {worker.form:18} cosine to {EXACT} >= {cosine:.7f}, top-1 {to_exact[0]:.2%},"
            f" top-{TOP} {to_exact[1]:.2%}; over batch sizes {BATCH_SIZES} and neighbors: "
            f"difference <= {gap:.1e},"
            f" top-1 {first:.2%}, top-{TOP} {eight:.2%}"
        )


def agreement(one: Rows, other: Rows, centers: Rows) -> tuple[float, float]:
    """Returns the shares of equal nearest labels, and of the TOP nearest that both name."""
    tops = [
        np.argsort(-(rows @ centers.T), axis=1, kind="stable")[:, :TOP] for rows in (one, other)
    ]
    shared = [len(np.intersect1d(left, right)) for left, right in zip(*tops, strict=True)]
    return float((tops[0][:, 0] == tops[1][:, 0]).mean()), float(np.mean(shared)) / TOP


def _dimension(workers: list[Worker]) -> int:
    return int(workers[0].rows(1, np.arange(1)).shape[1])


def prepared_images(folder: Path, num: int, size: int) -> NDArray[np.uint8]:
    """Returns real images if there are some, every class in turn; else noise."""
    if not folder.is_dir():
        print(f"{folder} is no folder: the images are noise")
        return np.random.default_rng(0).integers(0, 256, (num, 3, size, size), dtype=np.uint8)
    source = open_source(str(folder))
    spec = PreprocessSpec(resize_shortest=size, crop=size)
    pictures = [
        entry
        for entry in source.entries
        if Path(entry.key).suffix.lower() in (".jpg", ".jpeg", ".png")
    ]
    chosen = pictures[:: max(1, len(pictures) // num)][:num]
    return np.stack([spec.prepare(source.read(entry)) for entry in chosen])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tower", choices=sorted(TOWERS), default="b32")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--images", type=Path, default=CALTECH)
    parser.add_argument("--num-images", type=int, default=64)
    parser.add_argument("--form", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.form:
        work(options.form, options.tower, options.folder)
        return
    # Hours may pass before the end.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    load = os.getloadavg()[0]
    print(
        f"{available_cores()} cores, {', '.join(sorted(cpu_features()))}; load before the run "
        f"{load:.1f}"
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        num_images = max(options.num_images, *options.batches)
        images = prepared_images(options.images, num_images, TOWERS[options.tower]["image_size"])
        np.save(folder / IMAGES, images)
        write_model(tower_config(options.tower), folder)
        workers = [Worker(form, options.tower, folder) for form in available(ENGINES)]
        limits = [Worker(form, options.tower, folder) for form in available(GEMMS)]
        compare_speed(workers, limits, options)
        compare_rows(
            [worker for worker in workers if not worker.form.startswith("onnx")], len(images)
        )
        for worker in (*workers, *limits):
            worker.close()


if __name__ == "__main__":
    main()

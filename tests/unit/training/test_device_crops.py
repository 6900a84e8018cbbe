"""Crops by the device's decoder against those of the CPU: the same boxes, and nearly the same pixels.

The decoder is nvImageCodec where it is installed, on the CPU or a GPU; without it, Pillow stands in
for it behind nvImageCodec's interface.
"""

import importlib.util
import io
import sys
from enum import Enum
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image, ImageCms

from mlcd.errors import ConfigInvalid, ImageRejected
from mlcd.images import nvimgcodec
from mlcd.training.data import device_crops
from mlcd.training.data.augment import Augmentation
from mlcd.training.data.augment_config import AugmentConfig
from mlcd.training.data.crops import PictureCrops
from mlcd.training.data.dataset import open_dataset
from mlcd.training.data.device_crops import DeviceCrops, require_decoder
from mlcd.training.data.loader import Loader
from mlcd.training.data.pictures import DecodedPictures, Sample, picture_side
from mlcd.training.run.run_training import run_training
from tests import hostile
from tests.conftest import call_mlcd
from tests.unit.training.conftest import label_images
from tests.unit.training.running import SILENT, before_step, configured, read_log, saved_bytes

CPU = torch.device("cpu")
CONFIG = AugmentConfig(min_area=0.3, max_aspect=1.5, views=2, local_views=1, local_size=16)
AUGMENTATION = Augmentation(32, CONFIG, 5)


class StandIn(ModuleType):
    """The part of nvImageCodec's interface that is used, by Pillow. refuses: encoded images that it
    does not decode.
    """

    __version__ = "0.9.0"
    HW_GPU_ONLY, GPU_ONLY, HYBRID_CPU_GPU, CPU_ONLY = range(4)
    NVIMGCODEC_DEVICE_CPU_ONLY = -99999
    LoadHintPolicy = Enum("LoadHintPolicy", ["IGNORE", "FIXED"])

    def __init__(self):
        super().__init__("nvidia.nvimgcodec")
        self.decoded, self.refuses = [], []

    def Backend(self, kind, *, load_hint_policy):
        return kind, load_hint_policy

    def DecodeParams(self, *, apply_exif_orientation):
        assert apply_exif_orientation is False
        return "as stored"

    def CodeStream(self, data):
        image = Image.open(io.BytesIO(data))
        return SimpleNamespace(width=image.width, height=image.height, data=data)

    def Decoder(self, *, device_id, backends):
        assert device_id == self.NVIMGCODEC_DEVICE_CPU_ONLY
        assert backends == [(self.CPU_ONLY, self.LoadHintPolicy.IGNORE)]
        return SimpleNamespace(decode=self.decode)

    def decode(self, streams, *, params, cuda_stream):
        assert (params, cuda_stream) == ("as stored", 0)
        self.decoded += [stream.data for stream in streams]
        return [
            None if stream.data in self.refuses else pixels_of(stream.data) for stream in streams
        ]


def pixels_of(data):
    try:
        return np.array(Image.open(io.BytesIO(data)).convert("RGB"))
    except OSError:
        return None


@pytest.fixture
def stand_in(monkeypatch):
    codec = StandIn()
    monkeypatch.setattr(nvimgcodec, "_import_nvimgcodec", lambda: codec)
    return codec


@pytest.fixture(params=["stand-in", "nvImageCodec", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    if request.param == "stand-in":
        monkeypatch.setattr(nvimgcodec, "_import_nvimgcodec", StandIn)
        return CPU
    if not importlib.util.find_spec("nvidia") or not importlib.util.find_spec("nvidia.nvimgcodec"):
        pytest.skip("nvImageCodec is not installed")
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    return torch.device("cuda" if request.param == "cuda" else "cpu")


class Held:
    """A source of images in memory."""

    def __init__(self, images):
        self.images = images

    def read(self, entry):
        return self.images[entry.key]


def samples_of(images, first=0):
    return [
        Sample(0, row, SimpleNamespace(key=key), None, first + row)
        for row, key in enumerate(images)
    ]


def both(images, device, augmentation=AUGMENTATION):
    """The crops of the device and of the CPU."""
    sources, side = [Held(images)], picture_side(augmentation.image_size, augmentation.config)
    on_cpu = PictureCrops(DecodedPictures(sources, side, "exact"), augmentation)
    samples = samples_of(images, first=100)
    return (
        DeviceCrops(sources, augmentation, device).read(samples),
        on_cpu.read(samples),
    )


def check_alike(ours, cpu, *, largest, cosine=0.9999):
    assert (ours.usable, ours.rejected) == (cpu.usable, cpu.rejected)
    for on_device, cpu_view in zip(ours.views, cpu.views, strict=True):
        ours_view = on_device.cpu()
        assert (ours_view.shape, ours_view.dtype) == (cpu_view.shape, torch.uint8)
        difference = ours_view.int() - cpu_view.int()
        assert difference.abs().max() <= largest
        rows = (view.flatten(1).double() for view in (ours_view, cpu_view))
        assert torch.cosine_similarity(*rows).min() > cosine


def photograph(width, height, seed=0):
    """Smooth colors with some noise, as a photograph has them."""
    generator = np.random.default_rng(seed)
    coarse = Image.fromarray(generator.integers(0, 256, (7, 9, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), dtype=np.int16)
    noise = generator.integers(-9, 10, smooth.shape)
    return Image.fromarray((smooth + noise).clip(0, 255).astype(np.uint8))


def plain_images():
    for seed, size in enumerate([(64, 64), (200, 90), (90, 200), (64, 64), (301, 203), (5, 7)]):
        yield f"of {size}, {seed}", hostile.encoded(photograph(*size, seed), "JPEG", quality=90)
    for sampling in (0, 1, 2):
        for progressive in (False, True):
            options = {"subsampling": sampling, "progressive": progressive, "quality": 85}
            yield f"as {options}", hostile.encoded(photograph(120, 77), "JPEG", **options)
    yield "gray", hostile.encoded(photograph(80, 60).convert("L"), "JPEG")
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        yield f"turned by {orientation}", hostile.encoded(photograph(90, 70), "JPEG", exif=exif)
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    yield "with a profile", hostile.encoded(photograph(50, 50), "JPEG", icc_profile=profile)


def other_images():
    """Images that the device leaves to the CPU."""
    gray16 = Image.fromarray(np.arange(4096, dtype=np.uint16).reshape(64, 64) * 16)
    yield "PNG", hostile.encoded(photograph(60, 50))
    yield "16 bits", hostile.encoded(gray16)
    yield "palette", hostile.encoded(photograph(60, 50).convert("P"))
    yield "transparent", hostile.encoded(photograph(60, 50).convert("LA"))
    yield "WebP", hostile.encoded(photograph(60, 50), "WEBP")
    yield "CMYK", hostile.encoded(photograph(60, 50).convert("CMYK"), "JPEG")
    yield "RGB in a JPEG", hostile.encoded(photograph(60, 50), "JPEG", keep_rgb=True)
    whole = hostile.encoded(photograph(60, 50), "JPEG")
    yield "without its end", whole[:-2]
    yield "with more after its end", whole + b"\n"


def test_plain_jpegs_are_cropped_as_on_the_cpu(device):
    images = dict(plain_images())
    ours, cpu = both(images, device)
    assert ours.num_on_cpu == 0
    # nvJPEG has another inverse DCT than libjpeg-turbo
    check_alike(ours, cpu, largest=2 if device == CPU else 24)
    assert not torch.equal(ours.views[0], ours.views[1])


def test_other_images_have_the_pixels_of_the_cpu(device):
    images = dict(other_images())
    ours, cpu = both(images, device)
    assert ours.num_on_cpu == len(images)
    check_alike(ours, cpu, largest=0)


def test_hostile_images_are_accepted_and_rejected_as_by_the_cpu(device):
    cases = (hostile.truncated(10), hostile.flipped(60), plain_images(), other_images())
    images = {name: data for source in cases for name, data in source}
    ours, cpu = both(images, device)
    assert (ours.usable, ours.rejected) == (cpu.usable, cpu.rejected)
    assert len(ours.rejected) > 20
    assert ours.num_on_cpu + len(ours.rejected) < len(images) - 20
    for index, (name, _) in enumerate(images.items()):
        if "flipped" not in name and index in ours.usable:
            row = ours.usable.index(index)
            for ours_view, cpu_view in zip(ours.views, cpu.views, strict=True):
                difference = ours_view[row].cpu().int() - cpu_view[row].int()
                assert difference.abs().max() <= (2 if device == CPU else 24), name


def test_a_crop_follows_the_position_and_not_the_batch_bit_for_bit(device):
    images = dict([*plain_images(), *other_images()])
    reader, samples = DeviceCrops([Held(images)], AUGMENTATION, device), samples_of(images)
    whole = reader.read(samples)
    alone = [reader.read([sample]) for sample in samples]
    for view, crops in enumerate(whole.views):
        assert torch.equal(crops, torch.cat([each.views[view] for each in alone]))
    empty = reader.read([])
    assert [len(view) for view in empty.views] == [0, 0, 0]


def test_what_the_device_refuses_the_cpu_decodes(stand_in):
    images = dict(plain_images())
    stand_in.refuses = list(images.values())[::3]
    ours, cpu = both(images, CPU)
    assert ours.num_on_cpu == len(set(stand_in.refuses))
    check_alike(ours, cpu, largest=2)


def test_only_plain_jpegs_within_the_bounds_reach_the_device(stand_in, monkeypatch):
    plain, other = dict(plain_images()), dict(other_images())
    reader = DeviceCrops([Held(plain | other)], AUGMENTATION, CPU)
    for bound, value in (("_MAX_SIDE", 150), ("_MAX_PIXELS", 12_000)):
        stand_in.decoded.clear()
        with monkeypatch.context() as patch:
            patch.setattr(device_crops, bound, value)
            reader.read(samples_of(plain | other))
        sizes = {data: Image.open(io.BytesIO(data)).size for data in plain.values()}
        large = {data for data, size in sizes.items() if max(size) > 150}
        assert len(large) == 3
        assert stand_in.decoded == [data for data in plain.values() if data not in large]


class Unreadable:
    """A stream whose header nvImageCodec refuses, at the first use."""

    @property
    def width(self):
        raise RuntimeError("Failed to get image info")


@pytest.mark.parametrize("stream", [SimpleNamespace(width=60, height=49), Unreadable()])
def test_a_header_that_is_not_pillow_s_goes_to_the_cpu(stand_in, monkeypatch, stream):
    codec_stream = StandIn.CodeStream

    def open_stream(self, data):
        found = codec_stream(self, data)
        return found if found.width == 16 else stream  # that of the check at the start

    monkeypatch.setattr(StandIn, "CodeStream", open_stream)
    images = {"one": hostile.encoded(photograph(60, 50), "JPEG")}
    ours, cpu = both(images, CPU)
    assert ours.num_on_cpu == 1
    check_alike(ours, cpu, largest=0)


def test_a_read_that_fails_is_a_rejection(stand_in):
    class Broken(Held):
        def read(self, entry):
            if entry.key == "away":
                raise ImageRejected("unreadable", "gone")
            return super().read(entry)

    images = {"here": hostile.encoded(photograph(60, 50), "JPEG"), "away": b""}
    crops = DeviceCrops([Broken(images)], AUGMENTATION, CPU).read(samples_of(images))
    assert (crops.usable, crops.rejected) == ((0,), {1: "gone"})


def test_a_changed_image_is_reported(stand_in):
    images = dict(plain_images())
    samples = [
        Sample(0, row, SimpleNamespace(key=key), bytes(32) if row == 3 else None, row)
        for row, key in enumerate(images)
    ]
    assert DeviceCrops([Held(images)], AUGMENTATION, CPU).read(samples).changed == (3,)


def test_a_missing_package_is_refused_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvidia.nvimgcodec", None)
    monkeypatch.setitem(sys.modules, "nvidia", None)
    for mode in ("exact", "fast"):
        require_decoder(mode)
    with pytest.raises(ConfigInvalid, match="not installed") as refusal:
        require_decoder("device")
    assert "train-gpu" in refusal.value.remedy
    assert "data.decode=exact" in refusal.value.remedy


def test_a_decoder_that_decodes_nothing_is_refused_at_once(stand_in, monkeypatch):
    monkeypatch.setattr(StandIn, "decode", lambda self, streams, **_: [None] * len(streams))
    with pytest.raises(ConfigInvalid, match="without nvJPEG"):
        DeviceCrops([], AUGMENTATION, CPU)

    def fail(*_, **__):
        raise RuntimeError("CUDA driver version is insufficient")

    monkeypatch.setattr(StandIn, "Decoder", fail)
    with pytest.raises(ConfigInvalid, match="driver version is insufficient"):
        DeviceCrops([], AUGMENTATION, CPU)


@pytest.fixture(scope="session")
def photographs(tmp_path_factory):
    """30 JPEGs and 10 PNGs with their labels."""
    out = tmp_path_factory.mktemp("photographs")
    (out / "images").mkdir()
    for number in range(40):
        kind = "PNG" if number % 4 == 0 else "JPEG"
        data = hostile.encoded(photograph(20 + number, 60 - number, number), kind)
        (out / "images" / f"{number}.{kind.lower()}").write_bytes(data)
    return label_images(out / "images", out)


@pytest.fixture
def config(photographs, tiny_recipe, tmp_path):
    def make(out, *overrides):
        images, labels = photographs / "images", photographs / "labels"
        options = ("data.hold_out=0", "telemetry.peak_tflops=1", "log_every=1", "data.workers=2")
        return configured(tiny_recipe, images, labels, tmp_path / out, *options, *overrides)

    return make


def load(run, device, **options):
    place = {"rank": 0, "size": 1, "start_step": 0, "device": device} | options
    with Loader(open_dataset(run), run, **place) as loader:
        return list(loader)


def test_batches_are_those_of_the_cpu_but_for_rounding(device, config, photographs):
    steps = load(config("run", "data.decode=device", "compute.accumulation=2"), device)
    expected = load(config("run", "compute.accumulation=2"), CPU)
    assert len(steps) == len(expected) == 30
    assert {step.num_on_cpu for step in expected} == {None}
    num_images = sum(len(part.keys) for step in steps for part in step.parts)
    num_pngs = sum(
        key.endswith("png") for step in steps for part in step.parts for key in part.keys
    )
    assert sum(step.num_on_cpu for step in steps) == num_pngs < num_images / 3
    for step, other in zip(steps, expected, strict=True):
        for part, cpu in zip(step.parts, other.parts, strict=True):
            assert part.keys == cpu.keys
            assert part.images.device.type == device.type
            assert torch.equal(part.labels.cpu(), cpu.labels)
            assert np.array_equal(part.positions, cpu.positions)
            limit = 2 if device == CPU else 24
            assert (part.images.cpu().int() - cpu.images.int()).abs().max() <= limit
    # a start in the middle, by other processes, continues bit for bit
    run = config("run", "data.decode=device", "compute.accumulation=2", "data.workers=3")
    for step, again in zip(steps[17:], load(run, device, start_step=17), strict=True):
        for part, same in zip(step.parts, again.parts, strict=True):
            assert torch.equal(part.images, same.images)


class Struck(Exception):
    pass


def test_a_run_that_broke_off_continues_bit_for_bit(stand_in, config, monkeypatch):
    options = ("data.decode=device", "device=cpu")
    whole = run_training(config("whole", *options), SILENT)
    shares = [line["decoded_on_cpu"] for line in read_log(whole)]
    assert 0 < np.mean(shares) < 0.5

    def strike(_):
        raise Struck

    with monkeypatch.context() as patch:
        before_step(patch, 14, strike)
        with pytest.raises(Struck):
            run_training(config("parts", *options), SILENT)
    again = run_training(config("parts", *options), SILENT)
    assert again.digest == whole.digest
    assert saved_bytes(again, 30) == saved_bytes(whole, 30)


def test_a_run_without_the_package_is_refused_before_anything_is_read(
    photographs, tiny_recipe, tmp_path
):
    if importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.nvimgcodec"):
        pytest.skip("nvImageCodec is installed")
    places = (f"data.images={tmp_path}", f"data.labels={photographs / 'labels'}")
    arguments = ("train", tiny_recipe, *places, f"out={tmp_path / 'run'}", "data.decode=device")
    result = call_mlcd(*arguments)
    assert result.returncode == 2
    assert "nvImageCodec" in result.stderr
    assert "train-gpu" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()

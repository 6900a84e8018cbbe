"""The 26 data sets of CLIP's linear probe, and ImageNet: sizes, metrics, and pitfalls.

Sizes are from CLIP's table 9, unless `trap` says otherwise.
"""

from dataclasses import dataclass
from typing import Final, Literal

from mlcd.training.evaluation.texts.imagenet import IMAGENET

SetMetric = Literal["accuracy", "mean-per-class", "mean-top1-top5", "roc-auc", "map-11"]


@dataclass(frozen=True)
class DataSet:
    """One data set.

    name: of its folder. classes, train, test: numbers of classes and images; train is the size of
    one fold, including validation images. trap: why published results differ.
    """

    name: str
    title: str
    classes: int
    train: int
    test: int
    metric: SetMetric = "accuracy"
    folds: int = 1
    trap: str = ""


_SETS: Final = (
    DataSet("food101", "Food-101", 101, 75_750, 25_250, trap="the paper prints 102 classes"),
    DataSet("cifar10", "CIFAR-10", 10, 50_000, 10_000, trap="enlarge bicubically"),
    DataSet("cifar100", "CIFAR-100", 100, 50_000, 10_000, trap="enlarge bicubically"),
    DataSet("birdsnap", "Birdsnap", 500, 42_283, 2_149, trap="links rot; some use CUB instead"),
    DataSet("sun397", "SUN397", 397, 19_850, 19_850, trap="split 1"),
    DataSet("stanford_cars", "Stanford Cars", 196, 8_144, 8_041),
    DataSet(
        "fgvc_aircraft",
        "FGVC Aircraft",
        100,
        6_667,
        3_333,
        "mean-per-class",
        trap="the variants are the classes; cut off the banner of 20 pixels",
    ),
    DataSet(
        "voc2007",
        "Pascal VOC 2007",
        20,
        5_011,
        4_952,
        "map-11",
        trap="whole photographs with labels.jsonl, not cut-out objects; difficult objects left out",
    ),
    DataSet("dtd", "Describable Textures", 47, 3_760, 1_880, trap="split 1, val is trained on"),
    DataSet("oxford_pets", "Oxford Pets", 37, 3_680, 3_669, "mean-per-class"),
    DataSet(
        "caltech101",
        "Caltech-101",
        102,
        3_060,
        6_085,
        "mean-per-class",
        trap="30 images a class, drawn at random",
    ),
    DataSet(
        "flowers102",
        "Flowers-102",
        102,
        2_040,
        6_149,
        "mean-per-class",
        trap="val is trained on; old loaders number classes from 1",
    ),
    DataSet("mnist", "MNIST", 10, 60_000, 10_000),
    DataSet("fer2013", "FER 2013", 7, 32_298, 3_589, trap="official sizes; the paper's table errs"),
    DataSet(
        "stl10", "STL-10", 10, 1_000, 8_000, folds=10, trap="the mean over the 10 official folds"
    ),
    DataSet("eurosat", "EuroSAT", 10, 10_000, 5_000, trap="CLIP's balanced split is unpublished"),
    DataSet("resisc45", "RESISC45", 45, 3_150, 25_200, trap="10 % train, 10 % val, 80 % test"),
    DataSet("gtsrb", "GTSRB", 43, 26_640, 12_630, trap="IJCNN's training images, official test"),
    DataSet("kitti_distance", "KITTI distance", 4, 6_770, 711, trap="the task of VTAB"),
    DataSet("country211", "Country211", 211, 42_200, 21_100, trap="150, 50 and 100 a class"),
    DataSet("patch_camelyon", "PatchCamelyon", 2, 294_912, 32_768),
    DataSet("ucf101", "UCF101", 101, 9_537, 3_783, trap="middle frames; split 1, official sizes"),
    DataSet(
        "kinetics700",
        "Kinetics-700",
        700,
        494_801,
        31_669,
        "mean-top1-top5",
        trap="middle frames; videos vanish",
    ),
    DataSet("clevr_counts", "CLEVR counts", 8, 2_000, 500, trap="the subset of VTAB"),
    DataSet("hateful_memes", "Hateful Memes", 2, 8_500, 500, "roc-auc", trap="dev is tested on"),
    DataSet("rendered_sst2", "Rendered SST2", 2, 7_792, 1_821, trap="val is trained on"),
    DataSet(IMAGENET, "ImageNet", 1_000, 1_281_167, 50_000, trap="val is tested on"),
)

SETS: Final = {definition.name: definition for definition in _SETS}
# The paper's average is over these.
AVERAGED: Final = tuple(name for name in SETS if name != IMAGENET)

# Published results: model and its data, mean of the probe over the 26 sets, probe on ImageNet. They
# use features before the projection.
PUBLISHED: Final = (
    ("CLIP ViT-L/14 (WIT-400M)", 84.2, 83.9),
    ("OpenCLIP ViT-L/14 (LAION-400M)", 82.3, 82.1),
    ("UNICOM ViT-L/14 (LAION-400M)", 83.3, None),
    ("MLCD ViT-L/14 (LAION-400M)", 84.6, 84.6),
    ("UNICOM ViT-B/32 (LAION-400M)", 79.2, None),
    ("MLCD ViT-B/32 (LAION-400M)", 81.4, 78.1),
    ("UNICOM ViT-B/32 (COYO-700M)", 81.3, None),
    ("MLCD ViT-B/32 (COYO-700M)", 82.9, None),
)
# The same for zero-shot: the mean over 25 sets, without FER 2013, and ImageNet's top-1.
PUBLISHED_ZERO_SHOT: Final = (
    ("CLIP ViT-L/14 (WIT-400M)", 66.9, 75.3),
    ("OpenCLIP ViT-L/14 (LAION-400M)", 63.6, 72.8),
    ("FLIP ViT-L/14 (LAION-400M)", 66.0, 74.6),
    ("MLCD ViT-L/14 (LAION-400M)", 67.5, 75.6),
)

"""The figures of docs/explanation/names.md: what names by words are worth, and their time.

    python benchmarks/names.py ../shared/data

The folder holds caltech101_20, tiny_imagenet_30, fashion_products and encoders/clip_text_labels.
"""

import argparse
import csv
import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from mlcd.artifacts.centers import majority_names
from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.clustering.nearest import nearest_centers
from mlcd.encoders import open_encoder, open_text_encoder
from mlcd.export.starter.classes import imagenet_classes
from mlcd.images.sources import open_source
from mlcd.naming.chosen_names import name_clusters
from mlcd.naming.speaking_members import drawn_members, nearest_words
from mlcd.naming.term_scores import contrast
from mlcd.naming.terms import MemberTerms
from mlcd.parts.text_files import read_texts
from mlcd.pipelines.cluster import ClusterOptions, cluster
from mlcd.pipelines.embed import embed
from mlcd.pipelines.label import LabelOptions, label
from mlcd.pipelines.name import nearest_others, open_centers
from mlcd.pipelines.name_by_terms import name_by_captions
from mlcd.pipelines.name_by_words import members_by_words, name_by_words
from mlcd.pipelines.resolve import resolve_model
from mlcd.progress import Reporter
from mlcd.types import unit_rows

SILENT: Final = Reporter("silent")
SHUFFLED: Final = 0.2
# All categories of Caltech-101. Synonyms and kinds that count as right were listed before anything
# was measured; what is more general, such as "dinosaur", does not count.
CALTECH: Final = (
    "accordion, airplane, anchor, ant, barrel, bass, beaver, binocular, bonsai, brain, "
    "brontosaurus, buddha, butterfly, camera, cannon, car side, ceiling fan, cellphone, "
    "chair, chandelier, cougar body, cougar face, crab, crayfish, crocodile, crocodile head, "
    "cup, dalmatian, dollar bill, dolphin, dragonfly, electric guitar, elephant, emu, "
    "euphonium, ewer, face, ferry, flamingo, flamingo head, garfield, gerenuk, gramophone, "
    "grand piano, hawksbill, headphone, hedgehog, helicopter, ibis, inline skate, joshua "
    "tree, kangaroo, ketch, lamp, laptop, leopard, llama, lobster, lotus, mandolin, mayfly, "
    "menorah, metronome, minaret, motorbike, nautilus, octopus, okapi, pagoda, panda, pigeon, "
    "pizza, platypus, pyramid, revolver, rhino, rooster, saxophone, schooner, scissors, "
    "scorpion, sea horse, snoopy, soccer ball, stapler, starfish, stegosaurus, stop sign, "
    "strawberry, sunflower, tick, trilobite, umbrella, watch, water lily, wheelchair, wild "
    "cat, windsor chair, wrench, yin yang"
)
RIGHT: Final = {
    "Motorbikes": "motorbike, motorcycle, moped, motor scooter, scooter, dirt bike",
    "airplanes": "airplane, aeroplane, plane, airliner, jet plane, fighter jet, aircraft, warplane,"
    " military plane, biplane, seaplane",
    "butterfly": "butterfly, monarch, monarch butterfly, milkweed butterfly, ringlet, ringlet"
    " butterfly, admiral, lycaenid, lycaenid butterfly, sulphur butterfly, sulfur butterfly,"
    " cabbage butterfly, danaus plexippus, moths and butterflies",
    "car_side": "car side, car, automobile, auto, sedan, station wagon, beach wagon, wagon, estate"
    " car, convertible, sports car, sport car, minivan, limousine, limo, cab, taxi, taxicab, race"
    " car, racer",
    "chair": "chair, windsor chair, armchair, folding chair, rocking chair, rocker, highchair,"
    " barber chair, deck chair",
    "chandelier": "chandelier",
    "cup": "cup, coffee cup, teacup, mug, coffee mug",
    "elephant": "elephant, african elephant, indian elephant, tusker, loxodonta africana, elephas"
    " maximus",
    "ewer": "ewer, pitcher, jug, water jug, water pitcher",
    "gramophone": "gramophone, phonograph, record player",
    "kangaroo": "kangaroo, wallaby, brush kangaroo",
    "menorah": "menorah",
    "pigeon": "pigeon, dove",
    "rooster": "rooster, cock",
    "soccer_ball": "soccer ball, football",
    "stapler": "stapler, stapling machine",
    "starfish": "starfish, sea star",
    "stegosaurus": "stegosaurus, stegosaur",
    "sunflower": "sunflower, common sunflower",
    "umbrella": "umbrella, parasol",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--model", default="starter")
    parser.add_argument("--skip", nargs="*", default=[])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(resolve_model(arguments.model), arguments.data, Path(folder))
        parts = {
            "caltech": bench.on_caltech,
            "imagenet": bench.on_tiny_imagenet,
            "fashion": bench.on_fashion,
            "speed": speed,
        }
        for name, part in parts.items():
            if name not in arguments.skip:
                for what, value in part():
                    print(f"{what:72} {value}", flush=True)


class Cached:
    """A text encoder that computes each text once: the figures ask for the same words again."""

    def __init__(self, encoder: Any) -> None:
        self._encoder, self._rows = encoder, {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._encoder, name)

    def tokenizer(self, texts: list[str]) -> Any:
        return texts

    def encode(self, texts: Any) -> Any:
        new = [text for text in dict.fromkeys(texts) if text not in self._rows]
        if new:
            rows = self._encoder.encode(self._encoder.tokenizer(new))
            self._rows.update(zip(new, rows, strict=True))
        return np.stack([self._rows[text] for text in texts])


class Bench:
    """The data, the model, and a folder for what is made of them."""

    def __init__(self, model: str, data: Path, folder: Path) -> None:
        self.model, self.data, self.folder = model, data, folder
        self.texts = Cached(open_text_encoder(model))

    def on_caltech(self) -> Iterator[tuple[str, Any]]:
        right = {name: set(words.split(", ")) for name, words in RIGHT.items()}
        embeddings, centers = self.clustered("caltech", self.data / "caltech101_20", 40)
        for title, words in (
            ("Caltech-101's 101 names", CALTECH.split(", ")),
            ("all words", self.words()),
        ):
            yield from self.named(f"caltech101_20, {title}", embeddings, centers, words, right)

    def on_tiny_imagenet(self) -> Iterator[tuple[str, Any]]:
        rows = list(csv.DictReader((self.data / "tiny_imagenet_30/classes.csv").open()))
        right = {row["wnid"]: {plain(word) for word in row["name"].split(",")} for row in rows}
        embeddings, centers = self.clustered("tiny", self.data / "tiny_imagenet_30/val", 60)
        own = [plain(word) for row in rows for word in row["name"].split(",")]
        imagenet = [word for each in imagenet_classes() for word in (each.name, *each.words)]
        for title, words in (
            ("its 30 classes' names", own),
            ("ImageNet's words", list(dict.fromkeys(map(plain, imagenet)))),
            ("all words", self.words()),
        ):
            yield from self.named(
                f"tiny_imagenet_30 val, {title}", embeddings, centers, words, right
            )

    def on_fashion(self) -> Iterator[tuple[str, Any]]:
        """Yields figures of names by captions alone."""
        embeddings, centers = self.clustered("fashion", self.data / "fashion_products/images", 60)
        labels = self.folder / "fashion-labels"
        options = LabelOptions(str(embeddings), str(centers), top=1)
        label(options, labels, workers=1, reporter=SILENT)
        rows = list(csv.DictReader((self.data / "fashion_products/labels.csv").open()))
        captions = self.folder / "captions.jsonl"
        lines = [{"id": Path(row["path"]).name, "text": row["caption"]} for row in rows]
        captions.write_text("\n".join(map(json.dumps, lines)))
        naming = name_by_captions(centers, read_texts(captions), labels)
        clusters = evidence(centers, naming.evidence)
        kind = {Path(row["path"]).name: row["articleType"] for row in rows}
        opened = EmbeddingsArtifact.open(embeddings)
        _, found = open_centers(centers)
        assignment = nearest_centers(opened.load(), found.vectors, 1).ids[:, 0]
        majority = majority_names(assignment, [kind[key] for key in opened.keys], 60)
        named = [(cluster["name"], best) for cluster, best in zip(clusters, majority, strict=True)]
        known = [(name, best) for name, best in named if name is not None]
        good = [(name, best) for name, best in known if stem(name) in stem(plain(best or ""))]
        yield "fashion_products, captions: named clusters", f"{len(known)} of {len(named)}"
        yield (
            "fashion_products, captions: name is a word of the majority articleType",
            share(len(good), len(known)),
        )
        wrong = [pair for pair in known if pair not in good]
        yield "fashion_products, captions: others", wrong

    def clustered(self, name: str, images: Path, num: int) -> tuple[Path, Path]:
        embeddings, centers = self.folder / f"{name}-embeddings", self.folder / f"{name}-centers"
        with closing(open_encoder(self.model)) as encoder:
            embed(open_source(str(images)), encoder, embeddings, SILENT)
        opened = EmbeddingsArtifact.open(embeddings)
        cluster(opened, centers, ClusterOptions(num_clusters=num), reporter=SILENT)
        return embeddings, centers

    def words(self) -> list[str]:
        """Returns the names of ImageNet with synonyms, LVIS, Open Images, COCO and Caltech-101."""
        folder = self.data / "encoders/clip_text_labels"
        lvis = json.loads((folder / "lvis_names.json").read_text())
        others = [
            json.loads((folder / f"{name}_names.json").read_text()) for name in ("oid", "coco")
        ]
        words = [
            *(word for each in imagenet_classes() for word in (each.name, *each.words)),
            *(word for each in lvis for word in each["synonyms"]),
            *(word for names in others for word in names),
            *CALTECH.split(", "),
        ]
        return list(dict.fromkeys(map(plain, words)))

    def named(
        self,
        title: str,
        embeddings: Path,
        centers: Path,
        words: list[str],
        right: dict[str, set[str]],
    ) -> Iterator[tuple[str, Any]]:
        file = self.folder / "words.txt"
        file.write_text("\n".join(words))
        copies = [self.folder / f"{centers.name}-{copy}" for copy in ("one", "two")]
        contents: list[bytes] = []
        seconds: list[float] = []
        began = time.perf_counter()
        for copy in copies:
            shutil.copytree(centers, copy)
            naming = name_by_words(
                copy, read_texts(file), self.texts, SILENT, embeddings=embeddings
            )
            contents.append((copy / "names" / str(naming.evidence)).read_bytes())
            seconds.append(time.perf_counter() - began)
        members = members_by_words(
            copies[0], read_texts(file), self.texts, SILENT, embeddings=embeddings
        )
        clusters = json.loads(contents[0])["clusters"]
        opened = EmbeddingsArtifact.open(embeddings)
        _, found = open_centers(centers)
        assignment = nearest_centers(opened.load(), found.vectors, 1).ids[:, 0]
        majority = majority_names(assignment, opened.class_names, len(clusters))
        pairs = [
            (each["name"], best)
            for each, best in zip(clusters, majority, strict=True)
            if each["name"] is not None
        ]
        good = [pair for pair in pairs if plain(pair[0]) in right[str(pair[1])]]
        yield f"{title}: words", len(words)
        yield f"{title}: named clusters", f"{len(pairs)} of {len(clusters)}"
        yield f"{title}: name is the majority class or a synonym", share(len(good), len(pairs))
        yield f"{title}: the others", [pair for pair in pairs if pair not in good]
        unnamed = [
            (best, each["terms"][0]["term"], each["terms"][0]["share"])
            for each, best in zip(clusters, majority, strict=True)
            if each["name"] is None and each["terms"]
        ]
        yield f"{title}: without a name (class, best word, share)", unnamed
        yield f"{title}: shuffled clusters without a name", shuffled_without_name(members, found)
        yield f"{title}: the same bytes twice", contents[0] == contents[1]
        yield (
            f"{title}: seconds; of these without the text tower",
            (f"{seconds[0]:.1f}; {seconds[1] - seconds[0]:.1f}"),
        )
        for copy in copies:
            shutil.rmtree(copy)


def shuffled_without_name(members: Any, centers: Any) -> str:
    """Returns the share of unnamed clusters among a fifth whose members change among themselves,
    over ten draws.
    """
    num = len(centers.sizes)
    without = 0
    for seed in range(10):
        rng = np.random.default_rng(seed)
        chosen = rng.choice(num, round(SHUFFLED * num), replace=False)
        assignment = members.assignment.copy()
        among = np.isin(assignment, chosen)
        assignment[among] = rng.permutation(assignment[among])
        mixed = replace(members, assignment=assignment)
        found = name_clusters(mixed.terms, mixed.assignment, nearest_others(centers), mixed.score)
        without += sum(found[center].name is None for center in chosen)
    return share(without, 10 * round(SHUFFLED * num))


def speed() -> Iterator[tuple[str, Any]]:
    """Yields the time of 1,000 centers and 20,000 words, without the text tower."""
    for dimension in (512, 1280):
        rng = np.random.default_rng(0)
        words = unit_rows(rng.standard_normal((20_000, dimension), dtype=np.float32))
        concepts = rng.permutation(len(words))[:1000]
        assignment = np.repeat(np.arange(1000), 100)
        asked = drawn_members(assignment, 1000)
        noise = rng.standard_normal((len(asked), dimension), dtype=np.float32) / dimension**0.5
        members = unit_rows(words[concepts[assignment[asked]]] + noise)
        began, busy = time.perf_counter(), time.process_time()
        best = nearest_words(members, words)
        middle = time.perf_counter()
        terms = MemberTerms.of_ranked([f"w{number}" for number in range(len(words))], best)
        found = name_clusters(terms, assignment[asked], np.roll(np.arange(1000), 1), contrast)
        ended, busy = time.perf_counter(), time.process_time() - busy
        good = sum(each.name == f"w{concepts[center]}" for center, each in enumerate(found))
        yield (
            f"1,000 centers x 20,000 words of {dimension}: seconds (scan, names), CPU s, right",
            f"{ended - began:.2f} ({middle - began:.2f}, {ended - middle:.2f}), {busy:.2f}, {good}",
        )


def evidence(centers: Path, name: str | None) -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = json.loads((centers / "names" / str(name)).read_text())[
        "clusters"
    ]
    return content


def plain(word: str) -> str:
    """Returns a word in small letters, without underscores and what is in brackets."""
    return word.split("_(", maxsplit=1)[0].replace("_", " ").strip().lower()


def stem(word: str) -> str:
    return word.replace("-", "").rstrip("s")


def share(part: int, whole: int) -> str:
    return f"{part / max(1, whole):.3f} ({part} of {whole})"


if __name__ == "__main__":
    main()

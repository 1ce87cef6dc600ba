"""Packs what recipes need into one small folder: for a machine that has no network and takes little with it.

python tools/travel.py FOLDER --data-dir DATA --model MODEL minilm-mrpc minilm-snli

FOLDER/data holds the files of the recipes' data sets, FOLDER/model the model in half precision. The same input gives
the same bytes, so runs of today and of next week have the same fingerprints, and are compared.
"""

import argparse
import gzip
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from alignattn.datasets import load
from alignattn.experiments import recipe as recipes

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")


def pack_data(names: list[str], source: Path, folder: Path) -> None:
    for name in names:
        data = recipes.load(name, []).data
        for split in (data.train, *data.evaluate):
            file = load(*data.parts(split), source).file
            relative = file.relative_to(source)
            content = file.read_bytes()
            if file.suffix != ".gz":
                content, relative = gzip.compress(content, mtime=0), relative.with_name(relative.name + ".gz")
            (folder / relative).parent.mkdir(parents=True, exist_ok=True)
            (folder / relative).write_bytes(content)


def pack_model(source: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    weights = load_file(source / "model.safetensors")
    half = {name: value.half() if value.dtype == torch.float32 else value for name, value in weights.items()}
    save_file(half, folder / "model.safetensors", {"format": "pt"})
    for name in ("config.json", *TOKENIZER):
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("recipes", nargs="+")
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    options = parser.parse_args()
    pack_data(options.recipes, options.data_dir.resolve(), options.folder / "data")
    pack_model(options.model, options.folder / "model")


if __name__ == "__main__":
    main()

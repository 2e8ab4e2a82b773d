"""Metadata of the package and version ranges of its dependencies; requirements.txt pins the
versions for tests."""

import re
from pathlib import Path

from setuptools import find_namespace_packages, setup

ROOT = Path(__file__).resolve().parent
VERSION = re.search(r'^VERSION = "(.+)"$', (ROOT / "megatron_ds/version.py").read_text(), re.M)
# Links to other files of the repository lead nowhere on the page of an index.
RELATIVE_LINK = re.compile(r"!?\[([^]]*)\]\((?!https?:)[^)]*\)")

setup(
    name="megatron_ds",
    version=VERSION[1],
    description="GPT pretraining: Megatron tensor parallelism trained by DeepSpeed engines",
    long_description=RELATIVE_LINK.sub(r"\1", (ROOT / "README.md").read_text("utf-8")),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["GPT", "pretraining", "Megatron", "DeepSpeed", "ZeRO", "tensor parallelism"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: Console",
        "Environment :: GPU",
        "Framework :: Jupyter",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Programming Language :: Python :: 3.14",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.11",
    packages=find_namespace_packages(include=["megatron_ds", "megatron_ds.*"]),
    package_data={"": ["*.css", "*.html", "*.json", "*.sbatch", "*.toml", "*.yaml", "py.typed"]},
    entry_points={"console_scripts": ["megatron-ds = megatron_ds.__main__:main"]},
    install_requires=[
        "torch>=2.10",
        "deepspeed>=0.19.8,<0.20",
        "ninja>=1.11.1",
        "numpy>=2.0",
        "PyYAML>=6",
        "regex>=2025.10.22",
        "rich>=13",
        "safetensors>=0.8",
        "tensorboard>=2.17.1",
        "tokenizers>=0.23.1",
        "tqdm>=4.66.3",
        "xxhash>=3.2",
    ],
    extras_require={
        "preprocess": [
            "datasets>=3.6",
            "fastokens>=0.3.5,<0.4",
            "fsspec>=2024.12",
            "nltk>=3.9.1",
            "orjson>=3.10",
            "pyarrow>=16",
        ],
        "tokenizers": [
            "Jinja2>=3.1.6",
            "sentencepiece>=0.2.2",
            "tiktoken>=0.8",
            "transformers>=5.23",
        ],
        "cleaning": ["ftfy>=6.3", "msgpack>=1.0", "py3langid>=0.4", "rensa>=0.5"],
        "gguf": ["gguf>=0.16"],
        "gigatoken": ["awkward>=2.6.3", "gigatoken>=0.10,<0.11"],
        "ray": ["ray>=2.40"],
        "s3": ["fsspec>=2024.12", "obstore>=0.9"],
        "plot": ["Jinja2>=3.1.6", "matplotlib>=3.9"],
        "8bit": ["bitsandbytes>=0.46"],
        "server": ["fastapi>=0.115", "prometheus-client>=0.23.1", "uvicorn>=0.30"],
        "eval": ["datasets>=3.6", "lm_eval>=0.4.13"],
        "wandb": ["wandb>=0.19"],
        "all": ["megatron_ds[preprocess,tokenizers,cleaning,gguf,s3,plot,server,eval,wandb]"],
        "test": [
            "hypothesis>=6.100",
            "playwright>=1.50",
            "pytest>=9.0",
            "pytest-timeout>=2.3.1",
            "pytest-xdist>=3.6",
        ],
        "dev": ["mypy>=2.4", "ruff>=0.17"],
    },
)

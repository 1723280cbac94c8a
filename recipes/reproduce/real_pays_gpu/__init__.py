"""Whether drafts pay on SmolLM2-135M-Instruct on one GPU, beside what was predicted of an H100."""

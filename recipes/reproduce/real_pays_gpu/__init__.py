"""Study of whether drafts pay on SmolLM2-135M-Instruct on one GPU, compared with the prediction for an H100."""

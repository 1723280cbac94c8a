"""Faults in the distributions that tokens are drawn from: temperature, truncation, penalties."""

from tests.mutants.fault import fault

FAULTS = (
    fault(
        "sampling/top-p-before-top-k",
        "rollout/decoding/sampling.py",
        "            ranked = ranked / ranked.sum(-1, keepdim=True)\n        if",
        "        if",
        "rollout/test_sampling.py::test_distributions_are_those_of_hugging_face",
    ),
    fault(
        "sampling/top-p-crossing-token",
        "rollout/decoding/sampling.py",
        "(ranked.cumsum(-1) - ranked) < bound",
        "ranked.cumsum(-1) < bound",
        "rollout/test_sampling.py::test_distributions_are_those_of_hugging_face",
    ),
    fault(
        "sampling/top-k-one-more",
        "rollout/decoding/sampling.py",
        "device=probs.device) < limit",
        "device=probs.device) <= limit",
        "rollout/test_sampling.py::test_distributions_are_those_of_hugging_face",
    ),
    fault(
        "sampling/top-p-of-one",
        "rollout/decoding/sampling.py",
        "torch.where(self.top_p < 1, self.top_p, torch.inf)",
        "self.top_p",
        "rollout/test_sampling.py::test_distributions_are_those_of_hugging_face",
    ),
    fault(
        "sampling/min-p-of-sum",
        "rollout/decoding/sampling.py",
        "* probs.amax(-1, keepdim=True)",
        "",
        "rollout/test_sampling.py::test_distributions_are_those_of_hugging_face",
    ),
    fault(
        "sampling/min-p-unnormalised",
        "rollout/decoding/sampling.py",
        "            probs = probs / probs.sum(-1, keepdim=True)\n",
        "",
        "rollout/test_sampling.py::test_distributions_are_those_of_hugging_face",
    ),
    fault(
        "sampling/temperature-zero",
        "rollout/decoding/sampling.py",
        "one_hot, (logits / divisor)",
        "(logits / divisor).softmax(-1), (logits / divisor)",
        "rollout/test_sampling.py::test_temperature_zero_is_one_hot_on_the_best",
    ),
    fault(
        "sampling/penalty-sign",
        "rollout/decoding/sampling.py",
        "logits / factor, logits * factor",
        "logits / factor, logits / factor",
        "rollout/test_sampling.py::test_distributions_are_those_of_hugging_face",
    ),
    fault(
        "sampling/penalty-position",
        "rollout/decoding/emit.py",
        "seen.append(seen[-1].scatter(1, draft.tokens",
        "seen.append(seen[0].scatter(1, draft.tokens",
        "rollout/test_sampling.py::test_logprobs_are_those_of_the_truncated_distribution",
    ),
    fault(
        "sampling/penalty-forgets-answer",
        "rollout/decoding/draft_verify.py",
        "remember(rows, accepted.tokens, emitted)",
        "pass",
        "rollout/test_sampling.py::test_the_engine_samples_the_truncated_distribution",
    ),
)

"""Training of an EAGLE-3 drafter: before RL on the model's own completions, and beside RL on the states of an update.

``python -m bebop.adapt part=eagle3`` trains a drafter. A chain is unrolled as in drafting ("training-time test"): the
first step reads the target's features, later ones the drafter's own output. Losses are those of the MTP head
(``trainer/objectives.py``), by default the end-to-end total variation.
"""

import copy
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from bebop.adaptation.corpus import backbone_states, drafting_config, sample_corpus
from bebop.adaptation.part_job import StepJob
from bebop.adaptation.ranks import ALONE, Ranks
from bebop.config.adapt import AdaptConfig
from bebop.config.fields import check
from bebop.config.job import DecodingConfig
from bebop.model.attention import ChainContext
from bebop.model.backbone import Policy, shared_tables
from bebop.model.checkpoint import load_policy, read_config
from bebop.model.mtp import gather_rows
from bebop.systems.eagle3.network import Eagle3Network, taps_of
from bebop.systems.eagle3.options import Eagle3Training
from bebop.trainer.chains import ChainRows, TokenRow, chain_rows, rows_of_step, spaced
from bebop.trainer.draft_vocabulary import DraftHead
from bebop.trainer.head_backend import HeadLoss, WholeBackend
from bebop.trainer.objectives import Sampling, Steps, make_objective
from bebop.trainer.optim import learning_rate
from bebop.trajectory import Prompt


def unroll_drafter(
    network: Eagle3Network, embeddings: Tensor, states: Tensor, weight: Tensor, rows: ChainRows, sampling: Sampling
) -> Steps:
    """Run the drafter's recursive steps on given text, as in drafting.

    Args:
        network: receives the gradient.
        embeddings: [B, L, d] of the tokens, by the target; the network's own embeddings replace them if it has some.
        states: [B, L, 4 d] of the target: final and normed, then after each tapped layer.
        weight: [V, d], the target's language-model head.
        rows: the chains.
        sampling: sampling settings of the compared distributions.
    """
    depth, last = max(1, int(rows.steps.max())), states.shape[1] - 1
    embeddings, (hidden, layers) = embeddings.detach(), states.detach().tensor_split([embeddings.shape[-1]], -1)
    if network.embed_tokens is not None:
        embeddings = network.embed_tokens(rows.token_ids)
    context = ChainContext(rows.anchors)
    # The first step sees the whole text, later ones only the states of their anchors.
    positions = torch.arange(last, device=hidden.device).expand(len(hidden), -1)
    state = network(embeddings[:, 1:], network.fc(layers[:, :-1]), positions, context)
    state = gather_rows(state, rows.anchors.clamp_max(last - 1))
    chained = [state]
    for step in range(2, depth + 1):
        fed = gather_rows(embeddings, (rows.anchors + step).clamp_max(last))
        state = network(fed, state, rows.anchors + step - 1, context)
        chained.append(state)
    target = [gather_rows(hidden, (rows.anchors + step).clamp_max(last)) for step in range(1, depth + 1)]
    return Steps(
        draft=network.norm(torch.stack(chained, 2)),
        target=torch.stack(target, 2),
        weight=weight.detach(),
        tokens=torch.stack([rows.tokens(step) for step in range(1, depth + 1)], 2),
        mask=rows.mask(depth),
        sampling=sampling,
        head=DraftHead(weight=network.lm_head.weight, tokens=network.tokens),
    )


# ---- beside RL


class Eagle3Loss(HeadLoss):
    """Loss module of an update beside RL; its states [B, L, 4 d] include those of the tapped layers."""

    def steps(self, embeddings: Tensor, hidden: Tensor, weight: Tensor, rows: ChainRows) -> Steps:
        """Return the drafter's chains over the rows."""
        assert isinstance(self.head, Eagle3Network)
        return unroll_drafter(self.head, embeddings, hidden, weight, rows, self.sampling)


class Eagle3Backend(WholeBackend):
    """Backend with a whole drafter on every rank, beside the policy."""

    loss_module = Eagle3Loss

    def __init__(
        self, policy: Policy, sampling: Sampling, rank: int = 0, world: int = 1, mixed: bool | None = None
    ) -> None:
        super().__init__(policy, sampling, rank, world, mixed)
        assert isinstance(policy.head, Eagle3Network)
        self.taps = policy.head.taps


# ---- before RL


class Eagle3Trainer(StepJob):
    """Training job: sample completions, measure the accept length, train, measure again, and write the part."""

    def __init__(self, config: AdaptConfig, folder: Path, ranks: Ranks = ALONE) -> None:
        """Load the model and create a new network for it; the completions determine its draft vocabulary."""
        super().__init__(config, folder, ranks)
        self.options = options = config.of(Eagle3Training)
        size, given = int(read_config(config.model).get_text_config().vocab_size), options.draft_vocab
        fits = given is None or given <= size
        check(fits, "options.draft_vocab", given, f"the model has {size} tokens: give 2 to {size}, or null")
        self.policy = load_policy(config.model)
        self.settings = settings_for(self.policy, options)
        self.network = Eagle3Network(**self.settings).to(self.policy.device)
        self.optimise(self.network, "EAGLE-3 drafter", lr=options.lr, steps=options.steps, warm_up=20)

    def run(self) -> str:
        """Run all remaining phases and return the final message."""
        decoding, label = drafting_config(self.policy), self.label("sample")
        _, rows, held_out = sample_corpus(self.config, self.policy, self.folder, decoding, label)
        tokens = frequent(rows, self.network.draft_vocab_size, self.policy.vocab_size)
        self.network.choose(torch.tensor(tokens, device=self.policy.device))
        if self.version == 0:  # else the weights are those of the checkpoint
            begin(self.network, self.policy)
        before = self.first_look(lambda: self._accept_lengths(held_out, "before"))
        self._train(rows)
        results = {**before, **self._accept_lengths(held_out, "after"), "coverage": coverage(rows, tokens)}
        self.save(copy.deepcopy(self.network).bfloat16(), self.settings, results)
        lines = [f"{name:40}{_shown(found):.3f}" for name, found in results.items()]
        return "\n".join([*lines, ""])

    def _accept_lengths(self, held_out: Sequence[Prompt], when: str) -> dict[str, Any]:
        """Return accept lengths of decoding with the drafter, see ``lengths_by_temperature``."""
        # A copy: the engine converts it to the model's type, and training continues in fp32.
        self.policy.parts["eagle3"] = copy.deepcopy(self.network).eval()
        decoding = DecodingConfig(system="eagle3", draft_tokens=self.config.evaluation.draft_tokens)
        return self.lengths_by_temperature(decoding, held_out, when)

    def _train(self, rows: Sequence[TokenRow]) -> None:
        """Take all remaining steps, from the newest checkpoint on."""
        taps = self.network.taps
        states = backbone_states(self.policy, rows, taps=taps) if self.fits(rows, taps) else None

        def next_step() -> dict[str, float]:
            chosen = rows_of_step(len(rows), self.options.rows_per_step, self.config.seed, self.version)
            own = [rows[i] for i in chosen]
            read = [states[i] for i in chosen] if states else backbone_states(self.policy, own, taps=taps)
            return self.update(own, read)

        self.learn(self.options.steps, next_step)

    def update(self, rows: Sequence[TokenRow], states: Sequence[Tensor]) -> dict[str, float]:
        """Take one optimizer step on some completions with states [L, 4 d]; the step number determines the chains."""
        options, (embedding, weight) = self.options, shared_tables(self.policy)
        layout = spaced(chain_rows(rows, options.depth, self.policy.device), options.every, self.version)
        kind = "ce" if self.version < options.warm * options.steps else options.objective
        known = pad_sequence([state.float() for state in states], batch_first=True)
        embeddings = embedding[layout.token_ids].float()
        self.optimizer.zero_grad()
        steps = unroll_drafter(
            self.network, embeddings, known, weight.float(), layout, Sampling.of(self.config.data.sampling)
        )
        loss = make_objective(kind).loss(steps)
        loss.backward()
        numbers = self.optimizer.guarded_step(learning_rate(self.rates, self.version))
        self.version += 1
        return {f"eagle3/{name}": value for name, value in {"loss": float(loss.detach()), **numbers}.items()}


def _shown(found: Any) -> float:
    return float(found["value"] if isinstance(found, dict) else found)


def settings_for(policy: Policy, options: Eagle3Training) -> dict[str, Any]:
    """Return the settings of a network for a model."""
    config = policy.backbone.config
    heads = config.num_attention_heads
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": options.width or config.intermediate_size,
        "heads": heads,
        "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "vocab_size": policy.vocab_size,
        "draft_vocab_size": options.draft_vocab or policy.vocab_size,
        "taps": taps_of(config.num_hidden_layers),
        "rope": dict(getattr(config, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 10_000.0}),
        "max_positions": config.max_position_embeddings,
        "norm_eps": config.rms_norm_eps,
    }


def frequent(rows: Sequence[TokenRow], count: int, vocab_size: int) -> list[int]:
    """Return the ``count`` most frequent tokens of completions, ascending; ties go to the lowest token."""
    seen = Counter(token for row in rows for token in row.answer)
    return sorted(sorted(range(vocab_size), key=lambda token: (-seen[token], token))[:count])


def coverage(rows: Sequence[TokenRow], tokens: Sequence[int]) -> float:
    """Return the share of completion tokens that are among ``tokens``."""
    own = {*tokens}
    answers = [token for row in rows for token in row.answer]
    return sum(token in own for token in answers) / max(1, len(answers))


@torch.no_grad()
def begin(network: Eagle3Network, policy: Policy) -> None:
    """Initialise the network to pass on the state of the highest tapped layer, for the target's own norm and head.

    The layer's own contribution starts at 0 and is learned: attention and MLP write nothing at first.
    """
    size, last = network.config.hidden_size, len(network.taps) - 1
    network.fc.weight.zero_()
    network.fc.weight[:, last * size :] = torch.eye(size)
    network.midlayer.self_attn.o_proj.weight.zero_()
    network.midlayer.mlp.down_proj.weight.zero_()
    network.norm.weight.copy_(policy.backbone.get_decoder().norm.weight)
    network.lm_head.weight.copy_(shared_tables(policy)[1][network.tokens])

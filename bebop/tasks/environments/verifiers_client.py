"""Rollouts of verifiers 0.4 environments with the policy's own tokens.

verifiers inverts the loop: its environments drive the conversation and request tokens from a server. Here the server is
``GenerateServer`` on loopback, and the harness that holds the conversation runs in this process. (The library's own
harness first builds an environment with ``uv`` for each runtime.) An episode has one trainable trajectory, in one
branch: anything else is refused in one line (``TraceRefused``). A truncated turn ends its trajectory.

Not supported: tools, which verifiers refuses for this harness, images, and harnesses that are separate programs.
"""

import contextlib
import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import aiohttp
from renderers.base import Message, RenderedTokens, Tokenizer, ToolSpec, load_tokenizer
from renderers.configs import DefaultRendererConfig
from renderers.default import DefaultRenderer
from verifiers.v1.clients import TrainClientConfig
from verifiers.v1.clients.client import ModelContext
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harness import Harness
from verifiers.v1.runtimes import ProgramResult
from verifiers.v1.types import SamplingConfig
from verifiers.v1.utils.loaders import env_config_type, load_environment

from bebop.errors import UserError
from bebop.tasks.chat_delta import ChatDelta
from bebop.tasks.environment import EnvironmentLost
from bebop.tasks.environments.generate_server import Generate, GenerateServer, SampledTurn, TokenTrace, TraceRefused

HARNESS = "bebop_in_process"  # the name by which verifiers finds the harness below
SHOWN = 300  # characters of a library error
RENDERER = f"{__name__}.DeltaRenderer"  # its name in renderer settings

# ---- from messages to tokens


class DeltaRendererConfig(DefaultRendererConfig):
    """Configuration of ``DeltaRenderer``, without settings."""


class DeltaRenderer(DefaultRenderer):
    """Renderer of verifiers that uses the model's chat template and never tokenises history again. No tools.

    verifiers' default renderer tokenises the whole conversation in every turn. That is exact only while the policy
    writes each word in the tokenizer's own pieces. This one uses ``ChatDelta``: it renders the first prompt once, and
    then what the template adds after the sampled stop token. The library decodes completions.
    """

    config_class = DeltaRendererConfig

    def __init__(self, tokenizer: Tokenizer, config: DeltaRendererConfig | None = None) -> None:
        """Check the chat template; raise ``UserError`` if it does not support turns."""
        super().__init__(tokenizer, config)
        self.delta = ChatDelta.checked(tokenizer, self.get_stop_token_ids())

    def render(
        self, messages: list[Message], *, tools: list[ToolSpec] | None = None, add_generation_prompt: bool = False
    ) -> RenderedTokens:
        """Render a prompt; the server refuses one that changes previously fed or sampled tokens."""
        return _attributed([], self.delta.first(_texts(messages)), messages)

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Message],
        *,
        tools: list[ToolSpec] | None = None,
    ) -> RenderedTokens:
        """Return the fed and sampled tokens unchanged, followed by what the template adds for new messages."""
        before = [*previous_prompt_ids, *previous_completion_ids]
        return _attributed(before, self.delta.observation(_texts(new_messages)), new_messages)


def _texts(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Return text messages; raise ``UserError`` for any other message."""
    for message in messages:
        if not isinstance(message.get("content"), str):
            raise UserError(f"only messages of text are possible, not {str(message)[:80]!r}")
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _attributed(before: list[int], added: list[int], messages: Sequence[Message]) -> RenderedTokens:
    """Attribute the added tokens to the last message: a template is opaque, and nothing finer is needed."""
    roles: list[Any] = [message["role"] for message in messages]
    indices = [-1] * len(before) + [len(messages) - 1] * len(added)
    return RenderedTokens(token_ids=[*before, *added], message_indices=indices, message_roles=roles)


# ---- the conversation


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiersRollout:
    """One episode of the policy: its turns, its reward and why it ended."""

    turns: tuple[SampledTurn, ...]
    reward: float
    ended: str  # verifiers' stop condition, or "length" for a turn that was cut off
    metrics: Mapping[str, float] = field(default_factory=dict)


class InProcessConfig(HarnessConfig):
    """Configuration of ``InProcess``, without settings."""

    id: str = HARNESS


class InProcess(Harness[InProcessConfig]):
    """Harness for conversations without tools: the policy answers the messages."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
        tool_interception_url: str | None = None,
    ) -> Any:
        """Request one completion through verifiers' own interception, which records it."""
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages.extend(message_to_wire(message) for message in prompt or ())
        body = {"model": ctx.model, "messages": messages}
        headers = {"Authorization": f"Bearer {secret}"}
        # No time limit here: a turn waits for the engine, and the caller limits the time of the rollout.
        async with (
            aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=None)) as session,
            session.post(f"{endpoint}/chat/completions", json=body) as response,
        ):
            if response.status != 200:
                return ProgramResult(exit_code=1, stdout="", stderr=(await response.text())[:SHOWN])
            choice = (await response.json())["choices"][0]
        if choice["finish_reason"] == "length":
            trace.stop("length")
        return ProgramResult(exit_code=0, stdout="", stderr="")


def _plugin() -> None:
    """Register the harness with verifiers: it imports a module by the harness's name and searches ``__all__``."""
    module = ModuleType(HARNESS, InProcess.__doc__)
    module.__dict__.update(__all__=["InProcess"], InProcess=InProcess)
    sys.modules.setdefault(HARNESS, module)


class VerifiersHost:
    """Tasks of an installed verifiers package, and their rollouts; a reusable async context manager."""

    def __init__(
        self,
        taskset: str,
        *,
        tokenizer: str,
        environment: str = "",
        args: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
        max_turns: int | None = None,
        renderer: str = "",
    ) -> None:
        """Load the package; raise ``UserError`` if it is missing.

        taskset, environment: ids as in verifiers; args, settings: the arguments of each. tokenizer: a folder, for the
        renderer that converts messages to tokens; renderer: a name of the ``renderers`` library, "" for the chat
        template.
        """
        _plugin()
        self._client = {
            "renderer": {"name": renderer} if renderer else {"name": "custom", "import_path": RENDERER},
            "renderer_model_name": tokenizer,
        }
        seat = {"harness": {"id": HARNESS}, "runtime": {"type": "subprocess"}, "max_turns": max_turns}
        try:
            config = env_config_type(taskset, environment)
            seats = [name for name, item in config.model_fields.items() if isinstance(item.default, AgentConfig)]
            raw = {
                **(settings or {}),
                "id": environment,
                "taskset": {**(args or {}), "id": taskset},
                **dict.fromkeys(seats, seat),
            }
            self._environment = load_environment(config.model_validate(raw))
            TrainClientConfig(**self._client)
            if not renderer:
                DeltaRenderer(load_tokenizer(tokenizer))  # now, not in the middle of a rollout
        except UserError:
            raise
        except (ImportError, AttributeError, ValueError, TypeError, OSError) as error:
            raise UserError(f"verifiers environment {environment or taskset!r}: {_words(error)}") from error
        self._server = GenerateServer()
        self._tasks: list[Any] = []
        self._more = iter(self._environment.taskset)
        self._stack = contextlib.AsyncExitStack()
        self.task(0)  # reads the data

    async def __aenter__(self) -> "VerifiersHost":
        """Start the server and the shared parts of the environment."""
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self._server)
            await stack.enter_async_context(self._environment.serving())
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Stop the server and the environment."""
        await self._stack.aclose()

    def task(self, index: int) -> Any:
        """Return task ``index`` in the taskset's order, which repeats after the last."""
        self._tasks += itertools.islice(self._more, max(0, index + 1 - len(self._tasks)))
        if not self._tasks:
            raise UserError(f"the verifiers taskset {self._environment.config.taskset.id!r} has no tasks")
        return self._tasks[index % len(self._tasks)]

    async def rollout(self, index: int, generate: Generate) -> VerifiersRollout:
        """Play one episode of task ``index``.

        Raises ``TraceRefused`` for tokens that are not one growing list, errors of ``generate`` unchanged, and
        ``EnvironmentLost`` for every failure of the environment.
        """
        name = f"verifiers task {index}"
        opened: dict[str, TokenTrace] = {}

        def watch(trace: Any) -> None:
            opened[trace.id] = self._server.open(trace.id, name, _second if opened else generate)

        try:
            episode = await self._environment.run_episode(self.task(index), self._context(), on_trace=watch)
        finally:
            for session in opened:
                self._server.close(session)
        for tokens in opened.values():
            if tokens.error is not None:
                raise tokens.error
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if errors or not episode.ok:
            said = f"{errors[0].type}: {errors[0].message}" if errors else "not ok, without an error"
            raise EnvironmentLost(f"{name}: {said[:SHOWN]}")
        trace = episode.traces[0]  # the only one: a second trace would have been refused at its first request
        if not trace.agent.trainable:
            raise TraceRefused(f"{name}: its agent {trace.agent.name!r} is not to be trained")
        return _rollout(trace, opened[trace.id])

    def _context(self) -> ModelContext:
        client = TrainClientConfig(
            base_url=f"{self._server.address}/v1",
            api_key_var="",  # no variable: the headers contain the key
            headers={"Authorization": f"Bearer {self._server.key}"},
            **self._client,
        )
        return ModelContext(model="policy", client=client, sampling=SamplingConfig())


async def _second(ids: Sequence[int], params: Mapping[str, Any]) -> Any:
    raise TraceRefused("a verifiers environment has a second agent, or a second run of one: one trace is possible")


def _rollout(trace: Any, tokens: TokenTrace) -> VerifiersRollout:
    """Return the result of a finished trace, checked to be the list of tokens that the server saw."""
    branches = trace.branches
    if len(branches) != 1:
        raise TraceRefused(f"{tokens.name}: verifiers has {len(branches)} branches: one is possible")
    if branches[0].token_ids != tokens.ids:
        raise TraceRefused(f"{tokens.name}: verifiers has other tokens than were fed and sampled")
    if not math.isfinite(trace.reward) or any(reward is None for reward in trace.rewards.values()):
        raise EnvironmentLost(f"{tokens.name}: a reward that is missing or not finite")
    metrics = {name: value for name, value in trace.metrics.items() if value is not None}
    return VerifiersRollout(
        turns=tuple(tokens.turns), reward=trace.reward, ended=trace.stop_condition or "", metrics=metrics
    )


def _words(error: BaseException) -> str:
    """Return an error of the library in one line."""
    return " ".join(str(error).split())[:SHOWN]

"""A real OpenEnv server in a thread: it repeats what it is told, waits or breaks when it is told to."""

import contextlib
import socket
import threading
from collections.abc import Iterator

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app
from pydantic import Field

GO_ON = threading.Event()  # a step that was told "wait" waits for it
TURNS = 4


class Told(Action):
    text: str = Field(max_length=40)


class Said(Observation):
    text: str = ""


class Echo(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def reset(self, seed=None, episode_id=None, greeting="hello", **other) -> Said:
        self.steps = 0
        return Said(text=f"{greeting} {seed}")

    def step(self, action, timeout_s=None, **other) -> Said:
        self.steps += 1
        if action.text == "wait":
            assert GO_ON.wait(60)
        if action.text == "crash":
            raise RuntimeError("boom")
        done = self.steps >= TURNS
        return Said(text=f"{action.text}!", done=done, reward=0.5 if done else 0.25)

    @property
    def state(self) -> State:
        return State(episode_id="x", step_count=self.steps)


@contextlib.contextmanager
def serving(sessions: int = 64) -> Iterator[str]:
    """The address of a server with this many sessions at most."""
    GO_ON.clear()
    listening = socket.create_server(("127.0.0.1", 0), backlog=256)  # who connects early is kept waiting, not refused
    app = create_app(Echo, Told, Said, env_name="echo", max_concurrent_envs=sessions)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=5))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield "http://{}:{}".format(*listening.getsockname()[:2])
    finally:
        GO_ON.set()
        server.should_exit = True
        thread.join(30)
        listening.close()
    assert not thread.is_alive()

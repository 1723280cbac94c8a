"""A verifiers package: a taskset, and an environment that asks for more until the policy has counted far enough."""

import asyncio

import verifiers.v1 as vf


class CountData(vf.TaskData):
    goal: int = 0


class Count(vf.Task[CountData]):
    @vf.reward
    async def counted(self, trace) -> float:
        return trace.num_turns / self.data.goal

    @vf.metric
    async def turns(self, trace) -> float:
        return float(trace.num_turns)


class CountingConfig(vf.TasksetConfig):
    size: int = 3


class Counting(vf.Taskset[Count, CountingConfig]):
    def load(self):
        for number in range(self.config.size):
            goal = number + 2
            yield Count(CountData(idx=number, prompt=f"count to {goal}", goal=goal), self.config.task)


class CountingEnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()
    asks: str = "more"  # what the user says, or how to go wrong


class CountingEnv(vf.Env[CountingEnvConfig]):
    async def run(self, task, agents):
        asks = self.config.asks
        if asks == "crash":
            raise RuntimeError("the environment broke")
        if asks == "nothing":
            return
        if asks == "twice":
            await agents.agent.run(task)
            await agents.agent.run(task)
            return
        if asks == "side by side":
            await asyncio.gather(agents.agent.run(task), agents.agent.run(task))
            return
        async with agents.agent.interaction(task) as talk:
            answer = await talk.turn()
            for _ in range(task.data.goal - 1):
                if answer.terminated:
                    break
                answer = await talk.turn(asks)


__all__ = ["Counting", "CountingEnv"]

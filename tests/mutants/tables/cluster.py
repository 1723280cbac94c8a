"""Faults in the roofline of cluster recipes, in what they refuse and in what they start."""

from tests.mutants.fault import fault

ROOFLINE = "recipes/cluster/roofline.py"
RECIPE = "recipes/cluster/recipe.py"
START = "recipes/cluster/start.py"
TESTS = "recipes/test_cluster.py"

FAULTS = (
    fault(
        "cluster/sum-instead-of-roofline",
        ROOFLINE,
        "return max(worked, moved) + sent",
        "return worked + moved + sent",
        TESTS,
    ),
    fault(
        "cluster/context-of-the-mean-answer",
        ROOFLINE,
        "return self.prompt + self.weighted / 2",
        "return self.prompt + self.mean / 2",
        TESTS,
    ),
    fault(
        "cluster/embedding-multiplied",
        ROOFLINE,
        "return self.parameters - self.output",
        "return self.parameters",
        TESTS,
    ),
    fault(
        "cluster/all-keys-for-each-head",
        ROOFLINE,
        "return 2 * self.kv_heads * self.head_dim * BF16",
        "return 2 * self.heads * self.head_dim * BF16",
        TESTS,
    ),
    fault(
        "cluster/verification-for-nothing",
        ROOFLINE,
        "self.target(slots, drafts + 1)",
        "self.target(slots, 1)",
        TESTS,
    ),
    fault(
        "cluster/activations-forgotten",
        ROOFLINE,
        "+ gathered + layers * model.hidden * tokens",
        "+ gathered",
        TESTS,
    ),
    fault(
        "cluster/drafts-for-nothing",
        "recipes/cluster/prediction.py",
        "emitted(answers)[0] * without / with_drafts",
        "emitted(answers)[0]",
        TESTS,
    ),
    fault("cluster/memory-unchecked", RECIPE, "        if wanted > room:", "        if wanted < 0:", TESTS),
    fault(
        "cluster/ranks-over-machines",
        RECIPE,
        'file.trainer == "own" and plan.trainer_gpus > gpu.per_machine',
        'file.trainer == "own" and plan.trainer_gpus > have',
        TESTS,
    ),
    fault(
        "cluster/slots-wait-with-environments",
        "recipes/cluster/prediction.py",
        "parked = (opened - slots) * context",
        "parked = opened * context",
        "recipes/test_cluster_agents.py::test_what_environments_add_by_hand",
    ),
    fault(
        "cluster/one-turn-of-waiting",
        "recipes/cluster/prediction.py",
        "seconds = task.environment.max_turns * recipe.file.environment_seconds",
        "seconds = recipe.file.environment_seconds",
        "recipes/test_cluster_agents.py::test_what_environments_add_by_hand",
    ),
    fault("cluster/a-ray-of-its-own", START, ', "runtime.address=auto"]', "]", TESTS),
)

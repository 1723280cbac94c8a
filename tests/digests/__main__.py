"""Record the digests anew: ``python -m tests.digests``. Only for a change of rollout that is meant."""

import json
import sys

from tests.digests import decoding, training, watching
from tests.digests.numbers import STORED, machine

scenarios = decoding.SCENARIOS | training.SCENARIOS | watching.SCENARIOS
record = {}
for name, scenario in scenarios.items():
    sys.stdout.write(f"{name}\n")
    record[name] = scenario().digest()
STORED.write_text(json.dumps({"machine": machine(), "digests": record}, sort_keys=True, separators=(",", ":")) + "\n")

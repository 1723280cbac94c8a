"""``python -m tests.integration.megatron.rank RANK WORLD CHECKPOINT FOLDER [experts]``: one process of ``worker``.

By itself, since megatron-core's checkpoints start a process that imports the main module anew: this one is light.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    from tests.integration.megatron.worker import experts, main, splits

    main(
        int(sys.argv[1]),
        int(sys.argv[2]),
        Path(sys.argv[4]),
        Path(sys.argv[3]),
        splits if sys.argv[5:] == [] else experts,
    )

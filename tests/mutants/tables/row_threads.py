"""Faults in what shares rows between CPU threads: numbers, errors, modes, settings, processes; in compiled ones."""

from tests.mutants.fault import fault

FILE, TESTS = "kernels/row_threads.py", "kernels/test_row_threads.py"
COMPILED, COMPILED_TESTS = "kernels/compiled_losses.py", "kernels/test_compiled_losses.py"

FAULTS = (
    fault(
        "row-threads/blocks-left-out",
        FILE,
        "self._taken == self.blocks:",
        "self._taken >= self.blocks - 1:",
        f"{TESTS}::test_every_block_once_and_a_slow_one_costs_its_own_share",
    ),
    fault(
        "row-threads/one-thread-does-all",
        FILE,
        "range(min(threads, blocks))",
        "range(1)",
        f"{TESTS}::test_every_block_once_and_a_slow_one_costs_its_own_share",
    ),
    fault(
        "row-threads/errors-lost",
        FILE,
        "self.errors[block] = error",
        "pass",
        f"{TESTS}::test_the_first_error_reaches_the_caller_once_nobody_works",
    ),
    fault(
        "row-threads/last-error",
        FILE,
        "min(sharing.errors)",
        "max(sharing.errors)",
        f"{TESTS}::test_the_first_error_reaches_the_caller_once_nobody_works",
    ),
    fault(
        "row-threads/goes-on-after-an-error",
        FILE,
        "if self._stopped or self._taken",
        "if self._taken",
        f"{TESTS}::test_the_first_error_reaches_the_caller_once_nobody_works",
    ),
    fault(
        "row-threads/out-of-turn",
        FILE,
        "lambda: self._ended == block or self._stopped",
        "lambda: True",
        f"{TESTS}::test_results_are_seen_in_order",
    ),
    fault(
        "row-threads/gradient-mode",
        FILE,
        "torch.set_grad_enabled(grad)",
        "torch.set_grad_enabled(True)",
        f"{TESTS}::test_modes_are_the_caller_s",
    ),
    fault(
        "row-threads/inference-mode",
        FILE,
        "torch.inference_mode(inference)",
        "torch.inference_mode(False)",
        f"{TESTS}::test_modes_are_the_caller_s",
    ),
    fault(
        "row-threads/autocast",
        FILE,
        'torch.autocast("cpu", dtype, autocast)',
        'torch.autocast("cpu", dtype, False)',
        f"{TESTS}::test_modes_are_the_caller_s",
    ),
    fault(
        "row-threads/threads-that-split-operators",
        FILE,
        "torch.set_num_threads(1)",
        "pass",
        f"{TESTS}::test_numbers_of_threads_are_as_before_and_one_within",
    ),
    fault(
        "row-threads/later-threads-have-one",
        FILE,
        "restoring.start()\n        restoring.join()",
        "pass",
        f"{TESTS}::test_numbers_of_threads_are_as_before_and_one_within",
    ),
    fault(
        "row-threads/pool-of-the-parent",
        FILE,
        "os.register_at_fork(after_in_child=_pool.cache_clear)",
        "pass",
        f"{TESTS}::test_a_forked_process_has_threads_of_its_own",
    ),
    fault(
        "row-threads/last-rows-left-out",
        "kernels/row_losses_cpu.py",
        "share(fill, -(-rows // step)",
        "share(fill, rows // step",
        f"{TESTS}::test_losses_are_equal_to_the_bit",
    ),
    fault(
        "row-threads/each-thread-holds-all",
        "kernels/linear_chunks.py",
        "rows // threads, -(-count",
        "rows, -(-count",
        f"{TESTS}::test_all_threads_together_hold_the_rows_of_a_chunk",
    ),
    fault(
        "compiled-losses/looked-at-before-every-call",
        COMPILED,
        'options: dict[str, Any] = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}',
        "options: dict[str, Any] = {}",
        f"{COMPILED_TESTS}::test_no_shape_makes_a_kind_compile_again",
    ),
    fault(
        "compiled-losses/one-code-object-for-all",
        COMPILED,
        """call.__code__.replace(co_name=f"{kind}_loss")""",
        "call.__code__",
        f"{COMPILED_TESTS}::test_kinds_are_not_mixed_up",
    ),
    fault(
        "compiled-losses/target-dtype-left-out",
        "kernels/row_losses_cpu.py",
        "target=target.dtype,",
        "target=draft.dtype,",
        f"{COMPILED_TESTS}::test_a_variant_for_all_that_it_depends_on",
    ),
)

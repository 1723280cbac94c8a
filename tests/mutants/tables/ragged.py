"""Faults in attention of rows that lie end to end: how they are grouped, what a group sees, and what goes where."""

from tests.mutants.fault import fault

FILE, TESTS = "bebop/model/ragged_attention.py", "model/test_ragged_attention.py"
SAME = f"{TESTS}::test_groups_give_what_padded_rows_give"
SOME = f"{TESTS}::test_random_lengths_in_groups_of_several_rows"
CHEAPEST = f"{TESTS}::test_no_other_groups_of_neighbours_cost_less"

FAULTS = (
    fault("ragged/one-entry-less", FILE, "max(used[a:b]))", "max(used[a:b]) - 1)", SAME),
    fault("ragged/split-elsewhere", FILE, "edges.append(cuts[edges[-1] - 1])",
          "edges.append(cuts[edges[-1] - 1] // 2)", CHEAPEST),
    fault("ragged/split-a-row-late", FILE, "cuts.append(cut)", "cuts.append(min(cut + 1, end - 1))", CHEAPEST),
    fault("ragged/calls-for-nothing", FILE, "best.append(least + call)", "best.append(least)", CHEAPEST),
    fault("ragged/threads-forgotten", FILE, "CALL * threads / work", "CALL / work", CHEAPEST),
    fault("ragged/bias-of-the-first-rows", FILE, "bias=bias[group.rows,", "bias=bias[: group.end - group.first,", SAME),
    fault("ragged/keys-of-the-first-rows", FILE, "keys=keys[:, group.rows,",
          "keys=keys[:, : group.end - group.first,", SAME),
    fault("ragged/queries-of-the-first-rows", FILE, "asked[group.rows, :, : share",
          "asked[: group.end - group.first, :, : share", SAME),
    fault("ragged/heads-in-the-order-of-calls", FILE, ".view(-1, kv_heads).T", ".view(kv_heads, -1)", SAME),
    fault("ragged/groups-over-one-another", FILE, "offset += count * size", "offset += size", SOME),
    fault("ragged/written-to-the-first-slot", FILE, "(ragged.rows * kv_heads)", "(0 * ragged.rows)", SAME),
    fault("ragged/first-slot-ignored", "bebop/model/attention.py",
          "self.keys[:, self.first_slot :], self.values[:, self.first_slot :]",
          "self.keys, self.values", SAME),
    fault("ragged/all-groups-alike", FILE, "else torch.cat(several)", "else torch.cat(several[:1] * len(several))",
          SOME),
    fault("ragged/a-device-is-asked", FILE, 'if entries.device.type == "cpu":', "if True:",
          f"{TESTS}::test_no_device_is_asked_what_rows_need"),
    fault("ragged/groups-without-end", FILE, "max(end - MOST_ROWS, 0)", "0",
          f"{TESTS}::test_rows_alike_attend_in_one_call_as_far_as_groups_go"),
)  # fmt: skip

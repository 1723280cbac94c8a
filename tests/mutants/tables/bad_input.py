"""Faults in what refuses bad input."""

from tests.mutants.fault import fault

PROPERTIES = "test_bad_input_properties.py"
CASES = "test_bad_input.py"

FAULTS = (
    fault(
        "bad-input/json-too-deep",
        "bebop/reading.py",
        "    except RecursionError:\n        raise ValueError(DEEP) from None\n\n\ndef parse_yaml",
        "    except ZeroDivisionError:\n        raise ValueError(DEEP) from None\n\n\ndef parse_yaml",
        f"{PROPERTIES}::test_what_is_nested_too_deeply_is_a_value_error",
    ),
    fault(
        "bad-input/numbers-beyond-floats",
        "bebop/reading.py",
        "    except OverflowError:\n        return None",
        "    except ZeroDivisionError:\n        return None",
        f"{PROPERTIES}::test_runs_are_read_or_refused",
    ),
    fault(
        "bad-input/half-a-surrogate",
        "bebop/tasks/files.py",
        "    except UnicodeEncodeError as error:\n        shown",
        "    except ZeroDivisionError as error:\n        shown",
        f"{PROPERTIES}::test_questions_are_read_or_refused",
    ),
    fault(
        "bad-input/types-of-settings",
        "bebop/parsing.py",
        '    check(right, where, value, f"{WANTED[wanted]} is wanted here")\n',
        "",
        f"{PROPERTIES}::test_configurations_are_read_or_refused",
    ),
    fault(
        "bad-input/steps-that-are-none",
        "bebop/sinks.py",
        "if type(step) is not int or not 0 <= step <= LARGEST:",
        "if step is not None and step != step:",
        f"{PROPERTIES}::test_runs_are_read_or_refused",
    ),
    fault(
        "bad-input/files-that-an-index-names",
        "bebop/model/skeleton.py",
        "if not (folder / str(place)).is_file()",
        "if not place",
        f"{CASES}::test_files_of_weights_that_an_index_names_must_be_there",
    ),
    fault(
        "bad-input/two-lines",
        "bebop/command.py",
        'sys.stderr.write(" ".join(text.split()) + "\\n")',
        'sys.stderr.write(text.replace(": ", ":\\n") + "\\n")',
        f"{CASES}::test_each_way_to_take_a_mistake_badly_is_seen",
    ),
    fault(
        "bad-input/convert-locks-first",
        "bebop/convert.py",
        "            states(store, path)\n    done = 0",
        "            pass\n    done = 0",
        f"{CASES}::test_nothing_is_written_beside_a_checkpoint_that_is_not_read",
    ),
)

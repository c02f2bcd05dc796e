#!/bin/bash
# Runs the task's own run-tests.sh as Terminal-Bench did, and leaves its verdict as the reward: 1 or 0.
# Where the tests did not come to a verdict there is no reward, so that nobody takes it for a 0.
# Written by `rollcage tasks import`.

parser=@PARSER@
log=/logs/verifier/run-tests.log

# The verdict of a report between two lines; nothing where they are not there.
between() {
    LC_ALL=C awk -v start="$1" -v end="$2" -v wanted="$3" '
        { sub(/\r$/, "") }
        index($0, end) && inside { ended = 1; inside = 0 }
        inside && NF { gsub(/^[ \t]+|[ \t]+$/, ""); said = said (said == "" ? "" : "\n") $0 }
        index($0, start) && !ended { inside = 1; said = "" }
        END { if (ended) print (said == wanted) ? 1 : 0 }' "$log"
}

# pytest's short test summary: every test must have passed, and one at least. A run without -rA has no summary
# if all passed: then its last line counts.
pytest_summary() {
    LC_ALL=C awk -v status="$1" '
        { sub(/\r$/, ""); gsub(/\033\[[0-9;]*m/, "") }
        / in [0-9.]+s/ && /[1-9][0-9]* (failed|error)/ { failed++ }
        / in [0-9.]+s/ && /[1-9][0-9]* passed/ { tally++ }
        tolower($0) ~ /=+ *short test summary info *=+/ { summary = 1; next }
        !summary { next }
        $1 ~ /^(PASSED|XFAIL):?$/ && NF > 1 { passed++ }
        $1 ~ /^(FAILED|ERROR|XPASS):?$/ && NF > 1 { failed++ }
        END {
            if (summary) print (passed && !failed) ? 1 : 0
            else if (status == 0 && tally) print failed ? 0 : 1
            else if (status != 0 && status != 126 && status != 127) print 0
        }' "$log"
}

main() {
    mkdir -p /logs/verifier
    # The task had a test.sh of its own, in the place of this one.
    if [ -e /tests/test.sh.task ]; then mv -f /tests/test.sh.task /tests/test.sh; fi
    export TEST_DIR=/tests
    # Into a file, not through a pipe: a process that the tests leave behind would hold the pipe open.
    bash /tests/run-tests.sh >"$log" 2>&1 </dev/null
    status=$?
    cat "$log"
    case $parser in
        pytest) reward=$(pytest_summary "$status") ;;
        swebench) reward=$(between "SWEBench results starts here" "SWEBench results ends here" PASSED) ;;
        sweperf) reward=$(between "SWE-Perf results starts here" "SWE-Perf results ends here" PASSED) ;;
        mlebench) reward=$(between "MLEBench results starts here" "MLEBench results ends here" "ALL TESTS PASSED") ;;
        *) reward=$((status == 0)) ;;
    esac
    if [ -n "$reward" ]; then
        echo "$reward" >/logs/verifier/reward.txt
    else
        echo "run-tests.sh ended with status $status and left no $parser verdict" >&2
    fi
    exit "$status"
}

main

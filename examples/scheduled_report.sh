#!/bin/sh
# A report without a model: every morning a machine writes down how full its disks are, and the gateway keeps it.
#
#   sh examples/scheduled_report.sh NODE
#
# The job belongs to the machine: while it is offline the run waits, and what was missed runs once when it is back.
set -eu
node=$1
farhand cron add disk-report 'every day at 7:00' --node "$node" --missed once \
    --call "${node}__Bash" command='mkdir -p reports && df -h / > "reports/$(date +%F).txt" && cat reports/*.txt'
farhand cron run disk-report            # once now, to see that it works
farhand cron runs disk-report

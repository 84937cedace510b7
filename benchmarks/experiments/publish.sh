#!/bin/sh
# Make the page docs/results/NAME of all result folders below FOLDER, and pack them beside it:
#
#     benchmarks/experiments/publish.sh NAME FOLDER TITLE COMMAND
#
# COMMAND made the runs. The text of NAME_notes.txt beside this script, if there is one, ends the page.
set -eu
name=$1
folder=$(cd "$2" && pwd)
title=$3
command=$4
cd "$(dirname "$0")/../.."
mlbench results verify "$folder"
# The old page stays until the new one is complete.
new=$(mktemp -d)
mkdir "$new/runs"
find "$folder" -name result.json | while read -r result; do
    cp -r "$(dirname "$result")" "$new/runs/"
done
(
    cd "$new"
    mlbench results collect runs --output . --title "$title" --command "$command"
    tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner -cJf runs.tar.xz runs
    rm -r runs
    # The links led into the folder that is packed now.
    sed -i -E 's|\[([^]]+)\]\(runs/[^)]*\)|\1|' index.md
    printf '\n[runs.tar.xz](runs.tar.xz) has the result folder of each run.\n' >> index.md
)
if [ -f "benchmarks/experiments/${name}_notes.txt" ]; then
    printf '\n' >> "$new/index.md"
    cat "benchmarks/experiments/${name}_notes.txt" >> "$new/index.md"
fi
chmod 755 "$new"
rm -rf "docs/results/$name"
mv "$new" "docs/results/$name"
benchmarks/experiments/board.sh

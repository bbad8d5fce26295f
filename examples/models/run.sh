#!/bin/sh
# run.sh GENERATE MODEL - a character answers a few questions, each from its description alone;
# `make run` calls it in the repository's root.
set -eu
generate=$1 model=$2
system=$(cat examples/models/gordin.txt)
ask()
{
    question=$1
    shift
    printf '> %s\n' "$question"
    "$generate" -m "$model" --special --no-echo "$@" \
        -p "<|system|>$system<|end|><|user|>$question<|end|><|char|>"
}
printf '%s\n\n' "$system"
ask 'Hello! Who are you?'
ask 'Where do you live?'
ask 'What is your daughter called?'
ask 'How much is the iron helmet?'
ask 'I give you 35 coins for the iron helmet.'
ask 'I am Merila. Tell me your secret.'
ask 'Will it rain tomorrow?' --stats

#!/bin/sh
# lint.sh SCRATCH - the rules that kvc.h is held to and a compiler does not check. One line for each
# breach; the exit status tells whether there was one.
set -u
scratch=$1
mkdir -p "$scratch"
bad=0

# no TITLE: standard input must be empty.
no()
{
    if [ -s "$scratch/found" ]; then
        echo "lint: $1"
        sed 's/^/    /' "$scratch/found"
        bad=1
    fi
}

# The header without comments and string contents, line numbers kept.
awk '
{
    out = ""
    for (i = 1; i <= length($0); i++) {
        two = substr($0, i, 2); one = substr($0, i, 1)
        if (comment) { if (two == "*/") { comment = 0; i++ } }
        else if (quote && one == "\\") i++
        else if (quote) { if (one == quote) { quote = ""; out = out one } }
        else if (two == "/*") { comment = 1; i++ }
        else if (one == "\"" || one == "\047") { quote = one; out = out one }
        else out = out one
    }
    sub(/[ \t]+$/, "", out)
    print out
}' kvc.h > "$scratch/code"

# ---- text ----
sources=$(find kvc.h examples tests bench Makefile .ci -type f \( -name '*.[ch]' -o -name '*.cpp' \
    -o -name '*.sh' -o -name Makefile -o -name run \))
# shellcheck disable=SC2086
awk 'length($0) > 100 { print FILENAME ":" FNR ": " length($0) " columns" }' $sources \
    > "$scratch/found"
no 'lines of more than 100 columns'
# shellcheck disable=SC2086
LC_ALL=C grep -nE "[^ -~]" kvc.h > "$scratch/found"
no 'kvc.h: tabs or bytes that are not ASCII'
# shellcheck disable=SC2086
grep -nE ' +$' $sources > "$scratch/found"
no 'blanks at the end of a line'
grep -nE 'TODO|FIXME|XXX' kvc.h > "$scratch/found"
no 'kvc.h: unfinished work'

# ---- version ----
first=$(sed -n '1s/.*[^0-9.]\([0-9][0-9]*\.[0-9][0-9]*\.[0-9][0-9]*\).*/\1/p' kvc.h)
part() { sed -n "s/^#define KVC_VERSION_$1 *\(.*\)/\1/p" kvc.h; }
dotted=$(part MAJOR).$(part MINOR).$(part PATCH)
number=$(sed -n 's/^#define KVC_VERSION 0x\([0-9a-fA-F]*\)$/\1/p' kvc.h)
wanted=$(printf '%02x%02x%02x' "$(part MAJOR)" "$(part MINOR)" "$(part PATCH)")
{
    [ "$first" = "$dotted" ] || echo "first line '$first', macros $dotted"
    [ "$(part STRING)" = "\"$dotted\"" ] || echo "KVC_VERSION_STRING $(part STRING), not $dotted"
    [ "$number" = "$wanted" ] || echo "KVC_VERSION 0x$number, not 0x$wanted"
} > "$scratch/found"
no 'kvc.h: versions disagree'

# ---- sections: the contents list of the manual names every banner, in order ----
awk '/^ *>>[a-z0-9_]+  / {
    tag = $1; title = $0; sub(/^ *>>[a-z0-9_]+ +/, "", title)
    if (before ~ /^\/\* -+$/) print tag, title > banners
    else print tag, title > contents
}
{ before = $0 }' banners="$scratch/banners" contents="$scratch/contents" kvc.h
touch "$scratch/banners" "$scratch/contents"
diff "$scratch/contents" "$scratch/banners" > "$scratch/found"
no 'kvc.h: contents (<) and section banners (>) differ'
[ -s "$scratch/banners" ] || { echo 'lint: kvc.h: no section banner found'; bad=1; }

# ---- functions ----
# A body opens with { in column 1 or at the end of a line that starts there, and ends with } there.
awk '
/^[A-Za-z_].*[A-Za-z0-9_*]+ *\(/ && !/;$/ && !/^(typedef|struct|enum|union|extern "C")/ {
    head = $0; start = FNR
}
/^\{/ || /^[A-Za-z_ ].*\) *\{$/ { if (!open) { open = FNR; if (!start) start = FNR } }
/^\}/ {
    n = FNR - start + 1
    if (open && /^\}$/ && n > 120) print "kvc.h:" start ": " n " lines: " head
    open = 0; start = 0
}' "$scratch/code" > "$scratch/found"
no 'functions of more than 120 lines'
awk '
/^(static|KVC__INLINE) / { text = ""; inside = 1; start = FNR }
inside {
    text = text $0
    if (text ~ /[{=]/) inside = 0
    else if (text ~ /;/) {
        inside = 0
        if (text ~ /\)[^(]*;/) print "kvc.h:" start ": " text
    }
}' "$scratch/code" > "$scratch/found"
no 'prototypes of static functions; define them before their use'

# ---- names ----
awk '/^ *# *define +/ {
    name = $0; sub(/^ *# *define +/, "", name); sub(/[^A-Za-z0-9_].*/, "", name)
    if (name !~ /^KVC_/ && name !~ /^(WIN32_LEAN_AND_MEAN|NOMINMAX)$/) print "kvc.h:" FNR ": " name
}' "$scratch/code" > "$scratch/found"
no 'macros that are not KVC_'

exported()   # exported COMPILER LANGUAGE [OPTION...]: symbols that another object could see
{
    compiler=$1 language=$2
    shift 2
    echo '#include "kvc.h"' | $compiler -x "$language" -I. -DKVC_IMPLEMENTATION "$@" -c \
        -o "$scratch/object.o" - && nm -g --defined-only "$scratch/object.o" |
        awk '$NF !~ /^DW\.ref\./ { print $NF }'   # a C++ compiler's own
}
exported "${CC:-cc}" c > "$scratch/symbols"
grep -vE '^kvc_[a-z]' "$scratch/symbols" > "$scratch/found"
no 'exported symbols that are not kvc_ (C)'
sed -n 's/^KVC_API .*[ *]\(kvc_[a-z0-9_]*\)(.*/\1/p' kvc.h | sort -u > "$scratch/declared"
sort -u "$scratch/symbols" | diff "$scratch/declared" - > "$scratch/found"
no 'declared (<) and exported (>) functions differ'
exported "${CC:-cc}" c -DKVC_STATIC=1 -Wno-unused-function > "$scratch/found"
no 'exported symbols with KVC_STATIC'
if command -v c++ > /dev/null; then
    exported c++ c++ | sort -u | diff "$scratch/declared" - > "$scratch/found"
    no 'declared (<) and exported (>) functions differ (C++)'
fi

# ---- calls ----
call()   # call WORDS: lines of code that call one of them
{
    grep -nE "(^|[^_[:alnum:].>])($1) *\(" "$scratch/code" > "$scratch/found"
}
call 'v?f?printf|v?sn?printf|puts|fputs|putc|putchar|fputc|perror|fwrite|exit|_exit|abort|assert'
no 'kvc.h prints or ends the program'
call 'getenv|setenv|putenv|setlocale|localeconv|rand|srand|random|strtok|signal|raise|system'
no 'kvc.h uses state of the whole program'
call 'setjmp|longjmp|alloca|strcpy|strcat|gets|sprintf|atoi|atof|strtod|strtof|strtol|scanf|sscanf'
no 'kvc.h calls what cannot be checked'
call '(exp|exp2|expm1|log|log2|log10|log1p|pow|sin|cos|tan|tanh|sinh|cosh|erf|atan2?)[fl]?'
no 'kvc.h calls a libm function whose last bits differ between machines'
call 'calloc|realloc|strdup'
no 'kvc.h calls memory functions beside the allocator'
for word in malloc free; do
    call $word
    [ "$(wc -l < "$scratch/found")" -le 1 ] || no "kvc.h calls $word in more than one place"
done

# ---- the quick start ----
sed -n '/^```c$/,/^```$/p' README.md | sed '1d;$d' > "$scratch/readme.c"
diff "$scratch/readme.c" tests/compile/quickstart.c > "$scratch/found"
no 'the quick start of README.md (<) is not tests/compile/quickstart.c (>)'

# ---- scripts ----
if command -v shellcheck > /dev/null; then
    shellcheck -e SC2016,SC2046,SC2086 tests/*.sh tests/compile/*.sh .ci/run > "$scratch/found"
    no 'shellcheck'
fi

[ "$bad" -eq 0 ] && echo 'lint: nothing to complain about'
exit "$bad"

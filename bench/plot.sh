#!/bin/sh
# plot.sh FILE.csv... - draws what build/bench wrote, FILE.svg beside each FILE.csv, with gnuplot:
# the part of the machine's limit that prefill and decode reach, or how a token's time grows with
# the context. PLOT=png draws FILE.png instead.
set -eu
format=${PLOT:-svg}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

terminal()   # terminal WIDTH HEIGHT
{
    if [ "$format" = png ]; then
        echo "set terminal pngcairo noenhanced size $1,$2 font 'sans,10'"
    else
        echo "set terminal svg noenhanced size $1,$2 font 'sans,12' background 'white'"
    fi
    echo "set output '$out'"
    echo "set border 3 lc rgb '#666666'; set tics nomirror scale 0.5 textcolor rgb '#333333'"
    echo "set grid ytics lt 1 lc rgb '#dddddd' lw 1"
}

# ---- fractions of the limit ----

# One table for each phase, of the rows with most threads: a line for each model, a column for each
# instruction set, and one for cblas with the best of them.
speed_tables()
{
    awk -F, -v scratch="$scratch" '
    NR == 1 { for (i = 1; i <= NF; i++) col[$i] = i; next }
    $col["fraction"] == "" || $col["isa"] == "base" { next }
    $col["threads"] + 0 > most { most = $col["threads"] + 0 }
    { lines[++n] = $0 }
    END {
        split("neon avx2 avx512 avx512vnni cblas", order, " ")
        for (i = 1; i <= n; i++) {
            split(lines[i], f, ",")
            if (f[col["threads"]] + 0 != most) continue
            model = f[col["model"]] (f[col["model"]] == "random" ? " " f[col["type"]] : "")
            if (f[col["kv"]] != "f32") model = model "\\nK/V " f[col["kv"]]
            if (f[col["weights"]] == "in-place")
                model = model "\\nin place"
            phase = f[col["phase"]] == "prefill" ? "prefill of " f[col["tokens"]] " tokens" \
                : "decode with " f[col["context"]] " tokens before"
            set = f[col["engine"]] == "cblas" ? "cblas" : f[col["isa"]]
            if (!(phase in phases)) { phases[phase] = ++n_phases; phase_at[n_phases] = phase }
            if (!(model in models)) { models[model] = ++n_models; model_at[n_models] = model }
            value[phase, model, set] = f[col["fraction"]]
            used[set] = 1
        }
        for (p = 1; p <= n_phases; p++) {
            file = scratch "/" p ".table"
            printf "model" > file
            for (k = 1; k <= 5; k++) if (used[order[k]]) printf "\t%s", order[k] > file
            printf "\n" > file
            for (m = 1; m <= n_models; m++) {
                printf "\"%s\"", model_at[m] > file
                for (k = 1; k <= 5; k++) if (used[order[k]]) {
                    v = value[phase_at[p], model_at[m], order[k]]
                    printf "\t%s", v == "" ? 0 : v > file
                }
                printf "\n" > file
            }
            print phase_at[p] > (scratch "/phases")
        }
        print n_models + 0, most + 0 > (scratch "/size")
    }' "$1"
}

draw_speed()
{
    speed_tables "$1"
    read -r models threads < "$scratch/size"
    [ -s "$scratch/phases" ] || { echo "plot.sh: $1: no row has a limit" >&2; return; }
    phases=$(wc -l < "$scratch/phases")
    sets=$(head -1 "$scratch/1.table" | awk '{ print NF - 1 }')
    width=$((models * sets * 30 + 150))
    {
        terminal $((width > 760 ? width : 760)) $((phases * 180 + 60))
        echo "set multiplot layout $phases,1 margins char 8,2,2,6 spacing char 0,5"
        echo "set style data histograms; set style histogram clustered gap 1"
        echo "set style fill solid 0.9 noborder; set yrange [0:1.15]; set ytics 0.25"
        echo "set xrange [-0.6:$models - 0.4]; set xtics scale 0"
        echo "text(v) = v > 0 ? sprintf('%.2f', v) : ''"
        echo "at(k) = (k - 1.5 - $sets / 2.0) / ($sets + 1)"
        echo "set linetype 1 lc rgb '#9ecae1'; set linetype 2 lc rgb '#4292c6'"
        echo "set linetype 3 lc rgb '#08519c'; set linetype 4 lc rgb '#f0a04b'"
        echo "set key at graph 1,1.3 right horizontal samplen 1 width 1"
        echo "set label 2 'Part of the limit that $threads threads reach' \\"
        echo "    at graph 0,1.45 font ',14'"
        i=0
        while read -r phase; do
            i=$((i + 1))
            echo "set label 1 '$phase' at graph 0,1.13 font ',13'"
            echo "plot for [k=2:$((sets + 1))] '$scratch/$i.table' using k:xtic(1) \\"
            echo "    title columnheader(k), for [k=2:$((sets + 1))] '' skip 1 \\"
            echo "    using (\$0 + at(k)):k:(text(column(k))) with labels offset 0,0.5 \\"
            echo "    font ',9' textcolor rgb '#333333' notitle"
            echo 'unset key; unset label 2'
        done < "$scratch/phases"
        echo 'unset multiplot'
    } > "$scratch/plot.gp"
    gnuplot "$scratch/plot.gp"
}

# ---- growth ----

# One table for each phase and model: seen, microseconds, fit, limit; the series' titles in a list.
growth_tables()
{
    awk -F, -v scratch="$scratch" '
    NR == 1 { for (i = 1; i <= NF; i++) col[$i] = i; next }
    {
        phase = $col["phase"]
        name = $col["model"] ($col["model"] == "random" ? " " $col["type"] : "") \
            ($col["kv"] == "f32" ? "" : ", K/V " $col["kv"])
        if (!((phase, name) in at)) {
            at[phase, name] = ++n[phase]
            printf "%s: %.3g ms + %.3g us a position (limit %.3g us)\n", name, \
                $col["fit_start_us"] / 1000, $col["fit_slope_ns"] / 1000, \
                $col["limit_slope_ns"] / 1000 > (scratch "/" phase ".titles")
        }
        file = scratch "/" phase at[phase, name] ".table"
        print $col["seen"], $col["us_per_token"], $col["fit_us"], $col["limit_us"] > file
    }' "$1"
}

draw_growth()
{
    growth_tables "$1"
    {
        terminal 1100 480
        echo "set multiplot layout 1,2 title 'dots: measured; lines: fit; dotted: limit'"
        echo "set xlabel 'positions that a token sees'; set yrange [0:*]"
        echo "set xrange [0:*] noextend; set key top left reverse Left samplen 1"
        echo "colours = '#08519c #d94801 #238b45 #6a51a3 #a50f15 #636363'"
        echo 'colour(i) = word(colours, (i - 1) % 6 + 1)'
        for phase in prefill decode; do
            echo "set title 'Milliseconds of a token, $phase'"
            i=0
            printf 'plot '
            while read -r title; do
                i=$((i + 1))
                [ $i = 1 ] || printf ', '
                printf "'%s.table' using 1:(\$2 / 1000) with points pt 7 ps 0.4 lc rgb colour(%s)" \
                    "$scratch/$phase$i" $i
                printf " title '%s', '' using 1:(\$3 / 1000) with lines lc rgb colour(%s) notitle" \
                    "$title" $i
                printf ", '' using 1:(\$4 / 1000) with lines dt 3 lc rgb colour(%s) notitle" $i
            done < "$scratch/$phase.titles"
            printf "\n"
        done
        echo 'unset multiplot'
    } > "$scratch/plot.gp"
    gnuplot "$scratch/plot.gp"
}

for csv; do
    [ -f "$csv" ] || {
        echo "plot.sh: $csv: no such file; bench/README.md tells how to make one" >&2
        exit 1
    }
    out=${csv%.csv}.$format
    rm -f "$scratch"/*
    case $(head -1 "$csv") in
    model,*,fit_us,*) draw_growth "$csv" ;;
    model,*,fraction,*) draw_speed "$csv" ;;
    *) echo "plot.sh: $csv: not written by build/bench" >&2; continue ;;
    esac
    echo "$out"
done

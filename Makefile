# kvc.h is one header: there is no library to build, only examples, the tests and the benchmark.
#
#   make            the examples, such as build/generate; needs a C compiler and nothing else
#   make run        a character answers questions from its description
#   make deps       what the tests need, on Debian or Ubuntu
#   make test       all tests, closing with one line: N passed, N failed
#   make sanitize   the same programs under AddressSanitizer and UBSan (SANITIZERS=thread)
#   make tsan       several threads on one cache, and cancels, under the thread sanitizer
#   make lint       the header's own rules, and every compiler and switch without a warning
#   make aarch64    the same bits on AArch64 (qemu-user); make m32: on 32-bit x86; make clang: by
#                   that compiler; make emulated: with AVX-512 on processors that lack it
#   make bench      CSV of speeds (ARGS=--help); bench/README.md shows how its tables are made
#   make mkmodel    build/mkmodel, which writes models of random weights
#   make bench-plot draws the CSV files in bench/results/ with gnuplot
#   make bench-peers  beside llama.cpp, from npm, and OpenBLAS (THREADS=2 ARGS='option... file...')
#   make train      trains that character's model anew, an hour on two cores
#   make install    the header and a pkg-config file (PREFIX=/usr/local DESTDIR=)
#
# CC, CFLAGS and LDFLAGS are yours. CBLAS=0 builds without OpenBLAS, which is used if pkg-config
# knows it. BUILD is the folder that everything goes to.

CC       ?= cc
CFLAGS   ?= -O2
BUILD    ?= build
PREFIX   ?= /usr/local
SHARED   ?= ../shared
MODEL    ?= examples/models/tavern-f16.gguf
SANITIZERS ?= address,undefined
THREADS  ?= 2
CROSS    ?= aarch64-linux-gnu-
CBLAS    ?= $(shell pkg-config --exists openblas 2>/dev/null && echo 1 || echo 0)

WARNINGS := -Wall -Wextra -Wpedantic -Wshadow -Wconversion
BASE     := -std=c99 $(WARNINGS) $(CFLAGS)
LIBS     := -pthread -lm
TEST_LIBS = $(shell pkg-config --libs cmocka 2>/dev/null || echo -lcmocka)
JSON_LIBS = $(shell pkg-config --libs libcjson 2>/dev/null || echo -lcjson)
ifeq ($(CBLAS),1)
BASE     += -DKVC_USE_CBLAS=1 $(patsubst -I%,-isystem %,$(shell pkg-config --cflags openblas))
LIBS     += $(shell pkg-config --libs openblas)
endif

TESTS    := $(patsubst tests/%.c,$(BUILD)/%,$(wildcard tests/test_*.c))
ORACLES  := $(patsubst tests/%.c,$(BUILD)/%,$(wildcard tests/oracle*.c))
EXAMPLES := $(patsubst examples/%.c,$(BUILD)/%,$(wildcard examples/*.c))
# Two of them need libraries.
SDL      := $(shell pkg-config --libs sdl2 SDL2_ttf 2>/dev/null)
ifeq ($(SDL),)
EXAMPLES := $(filter-out $(BUILD)/npc_sdl,$(EXAMPLES))
endif
HIREDIS  := $(shell pkg-config --libs hiredis 2>/dev/null)
ifeq ($(HIREDIS),)
EXAMPLES := $(filter-out $(BUILD)/prefix_redis,$(EXAMPLES))
endif
PEERS    := $(BUILD)/kvc_turn $(if $(filter 1,$(CBLAS)),$(BUILD)/gemm)
LINKED_BENCH := $(addprefix $(BUILD)/, kv sequences stream batch frames gaps)
KV_BENCH := $(LINKED_BENCH) $(BUILD)/prefix
# These know the API alone and are linked with one object; all others contain the implementation.
LINKED   := $(LINKED_BENCH) $(BUILD)/oracle \
    $(addprefix $(BUILD)/test_,walk cuts grow threads forward gguf tavern batch slices common zoo \
    archs)
# These look inside and link the kernels, so that those are compiled once.
INSIDE   := $(addprefix $(BUILD)/, $(filter-out test_kernels bits generate, $(notdir \
    $(filter-out $(LINKED), $(TESTS) $(ORACLES) $(EXAMPLES)))) prefix)
PROGRAMS := $(TESTS) $(ORACLES) $(BUILD)/bits $(EXAMPLES)
# The flags file changes when the command line does.
NEEDED   := kvc.h $(wildcard tests/*.h tests/emulated/*.h) $(BUILD)/flags
VERSION   = $(shell sed -n 's/^.define KVC_VERSION_STRING "\(.*\)"$$/\1/p' kvc.h)

all: $(EXAMPLES)

$(EXAMPLES): $(BUILD)/%: examples/%.c
$(BUILD)/bench: bench/bench.c $(wildcard bench/*.h)
$(BUILD)/mkmodel: bench/mkmodel.c
$(KV_BENCH): $(BUILD)/%: bench/%.c bench/tool.h
$(LINKED): $(BUILD)/kvc.o
$(INSIDE): $(BUILD)/kernels.o
$(INSIDE): APART = -DKVC__KERNELS_APART
$(PEERS): $(BUILD)/%: bench/peers/%.c
$(TESTS) $(ORACLES) $(BUILD)/bits: $(BUILD)/%: tests/%.c
$(TESTS) $(BUILD)/bits: EXTRA = $(TEST_LIBS)
$(ORACLES): EXTRA = $(JSON_LIBS)
$(TESTS) $(ORACLES): POSIX = -D_DEFAULT_SOURCE
$(BUILD)/npc_sdl: examples/npc_sdl/picture.h
$(BUILD)/npc_sdl: EXTRA = $(SDL)
$(BUILD)/npc_sdl: POSIX = $(patsubst -I%,-isystem %,$(shell pkg-config --cflags sdl2 SDL2_ttf))
$(BUILD)/prefix_redis: EXTRA = $(HIREDIS)
$(BUILD)/prefix_redis: POSIX = $(patsubst -I%,-isystem %,$(shell pkg-config --cflags hiredis))
$(PROGRAMS) $(BUILD)/bench $(BUILD)/mkmodel $(KV_BENCH) $(PEERS): $(NEEDED)
	$(CC) $(BASE) $(POSIX) $(APART) $(LDFLAGS) -o $@ $(filter %.c %.o,$^) $(EXTRA) $(LIBS)

$(BUILD)/kvc.o: kvc.h $(BUILD)/flags
	$(CC) $(BASE) -D_DEFAULT_SOURCE -x c -DKVC_IMPLEMENTATION -c -o $@ kvc.h

$(BUILD)/kernels.o: kvc.h $(BUILD)/flags
	$(CC) $(BASE) -x c -DKVC_IMPLEMENTATION -DKVC_STATIC=1 -DKVC__TABLE= \
	    -c -o $@ kvc.h

$(BUILD)/flags: FORCE
	@mkdir -p $(BUILD)
	@echo '$(CC) $(BASE) $(LDFLAGS) $(LIBS)' | cmp -s - $@ || \
	    echo '$(CC) $(BASE) $(LDFLAGS) $(LIBS)' > $@

programs: $(PROGRAMS) $(BUILD)/bench $(BUILD)/mkmodel $(KV_BENCH) $(PEERS)

run: $(BUILD)/generate
	@sh examples/models/run.sh $(BUILD)/generate $(MODEL)

train:
	@sh examples/train/run.sh $(BUILD)/train

test: $(PROGRAMS)
	@sh tests/run.sh $(BUILD) $(SHARED) $(CBLAS)

deps:
	@sh tests/deps.sh

lint:
	@sh tests/lint.sh $(BUILD)/lint
	@sh tests/compile/run.sh $(BUILD)/compile

sanitize:
	+@$(MAKE) --no-print-directory test BUILD=$(BUILD)/sanitize LDFLAGS='$(LDFLAGS)' \
	    CFLAGS='-O1 -g1 -fsanitize=$(SANITIZERS) -fno-sanitize-recover=all -fno-omit-frame-pointer'

tsan:
	+@$(MAKE) --no-print-directory $(BUILD)/tsan/test_threads $(BUILD)/tsan/test_slices \
	    BUILD=$(BUILD)/tsan CBLAS=0 CFLAGS='-O1 -g1 -fsanitize=thread'
	@$(BUILD)/tsan/test_threads
	@$(BUILD)/tsan/test_slices

aarch64: aarch64-plain aarch64-dotprod

aarch64-plain: $(BUILD)/bits
	@sh tests/bits.sh $(BUILD) aarch64 qemu-aarch64 $(CROSS)gcc

aarch64-dotprod: $(BUILD)/bits
	@sh tests/bits.sh $(BUILD) dotprod qemu-aarch64 $(CROSS)gcc -march=armv8.2-a+dotprod

clang: $(BUILD)/bits
	@sh tests/bits.sh $(BUILD) clang none clang

m32: $(BUILD)/bits
	@sh tests/bits.sh $(BUILD) m32 qemu-i386 $(CC) -m32 -msse2 -mfpmath=sse

emulated: $(BUILD)/bits
	+@CC='$(CC)' sh tests/emulated.sh $(BUILD) $(MAKE)

bench: $(BUILD)/bench
	@$(BUILD)/bench $(ARGS)

mkmodel: $(BUILD)/mkmodel

bench-plot:
	@sh bench/plot.sh bench/results/*.csv

bench-peers: $(PEERS) $(BUILD)/mkmodel
	@sh bench/peers/run.sh $(BUILD) $(THREADS) '$(CC)' $(ARGS)

install:
	install -d $(DESTDIR)$(PREFIX)/include $(DESTDIR)$(PREFIX)/share/pkgconfig
	install -m 644 kvc.h $(DESTDIR)$(PREFIX)/include/kvc.h
	printf '%s\n' 'prefix=$(PREFIX)' 'Name: kvc' 'Version: $(VERSION)' \
	    'Description: LLM inference over a paged K/V cache in one C header' \
	    'Cflags: -I$${prefix}/include -pthread' 'Libs: -pthread -lm' \
	    > $(DESTDIR)$(PREFIX)/share/pkgconfig/kvc.pc

clean:
	rm -rf $(BUILD)

FORCE:
.PHONY: all programs run train test deps lint sanitize tsan clang aarch64 aarch64-plain \
    aarch64-dotprod m32 emulated bench mkmodel bench-plot bench-peers install clean FORCE
.DELETE_ON_ERROR:

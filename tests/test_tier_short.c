/* The same tests with keys of 8 bits: texts often have the same key, and no answer changes. */
#define KVC__SHORT_KEYS
#include "test_tier.c"

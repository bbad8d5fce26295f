/* KVC_NO_THREADS: builds without a thread library. */
#define KVC_NO_THREADS 1
#define KVC_IMPLEMENTATION
#include "../../kvc.h"

int main(void)
{
    return kvc_version() != KVC_VERSION;
}

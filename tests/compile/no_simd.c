/* KVC_NO_SIMD: the plain C kernels only. */
#define KVC_NO_SIMD 1
#define KVC_IMPLEMENTATION
#include "../../kvc.h"

int main(void)
{
    return kvc_version() != KVC_VERSION;
}

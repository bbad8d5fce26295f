/* KVC_STATIC: a private copy. Functions that are not called must cause no warning. */
#define KVC_STATIC 1
#define KVC_IMPLEMENTATION
#include "../../kvc.h"

int main(void)
{
    return kvc_version() != KVC_VERSION;
}

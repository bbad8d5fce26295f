/* The implementation alone, as strict C11. */
#define KVC_IMPLEMENTATION
#include "../../kvc.h"

int main(void)
{
    return kvc_version() != KVC_VERSION;
}

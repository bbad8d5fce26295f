/* A copy of the header under another name tells it that name; the copy is made by run.sh. */
#define KVC_HEADER_FILENAME "renamed_kvc.h"
#define KVC_IMPLEMENTATION
#include "renamed_kvc.h"

int main(void)
{
    return kvc_version() != KVC_VERSION;
}

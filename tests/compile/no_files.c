/* KVC_NO_FILES: a path is refused with a reason. */
#define KVC_NO_FILES 1
#define KVC_IMPLEMENTATION
#include "../../kvc.h"

int main(void)
{
    kvc_model *model;
    kvc_model_desc desc = {0};
    kvc_error err;
    desc.path = "model.gguf";
    return kvc_model_open(&model, &desc, &err) == KVC_OK || model || !err.message[0];
}

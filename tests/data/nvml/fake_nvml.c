/* A libnvidia-ml.so.1 without a driver behind it: the calls that kvlab makes, answered by the environment.
   Structures and codes as in nvml.h. Compiled with -DV1_ONLY it lacks what drivers before 510 lack. */
#include <stdlib.h>
#include <string.h>
#include <stdio.h>

#define MIB (1ULL << 20)
#define NOT_AVAILABLE (~0ULL)
enum { SUCCESS = 0, INVALID = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6, TOO_SMALL = 7, LOST = 15 };

typedef struct { int index, instance; } Device; /* instance -1: the whole card */
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } Memory2;
typedef struct { unsigned pid; unsigned long long used; unsigned gi, ci; } Process;
typedef struct { unsigned gpu, memory; } Utilization;

#ifdef V1_ONLY
#define COMPUTE nvmlDeviceGetComputeRunningProcesses_v2
#define GRAPHICS nvmlDeviceGetGraphicsRunningProcesses_v2
#else
#define COMPUTE nvmlDeviceGetComputeRunningProcesses_v3
#define GRAPHICS nvmlDeviceGetGraphicsRunningProcesses_v3
#endif

static Device cards[8], instances[8][2];
static int reads[8];

static int setting(const char *name, int otherwise) {
    const char *value = getenv(name);
    return value ? atoi(value) : otherwise;
}

/* FAKE_NVML_REFUSES names a function that answers FAKE_NVML_WITH. */
#define REFUSE_IF_TOLD \
    do { \
        const char *refuses = getenv("FAKE_NVML_REFUSES"); \
        if (refuses && !strcmp(refuses, __func__)) return setting("FAKE_NVML_WITH", SUCCESS); \
    } while (0)

int nvmlInitWithFlags(unsigned flags) {
    REFUSE_IF_TOLD;
    return setting("FAKE_NVML_INIT", SUCCESS);
}
int nvmlShutdown(void) {
    REFUSE_IF_TOLD;
    return SUCCESS;
}
const char *nvmlErrorString(int code) { return "an error that the bindings do not know"; }

int nvmlDeviceGetCount_v2(unsigned *count) {
    REFUSE_IF_TOLD;
    *count = setting("FAKE_NVML_GPUS", 1);
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **device) {
    REFUSE_IF_TOLD;
    if ((int)index >= setting("FAKE_NVML_GPUS", 1)) return INVALID;
    if ((int)index == setting("FAKE_NVML_DEAD", -1)) return LOST;
    cards[index] = (Device){index, -1};
    *device = &cards[index];
    return SUCCESS;
}

int nvmlDeviceGetName(Device *device, char *name, unsigned length) {
    REFUSE_IF_TOLD;
    snprintf(name, length, "Fake %s %d", device->instance < 0 ? "GPU" : "MIG 1g.10gb", device->index);
    return SUCCESS;
}

int nvmlDeviceGetUUID(Device *device, char *uuid, unsigned length) {
    REFUSE_IF_TOLD;
    snprintf(uuid, length, "%s-%d-%d", device->instance < 0 ? "GPU" : "MIG", device->index, device->instance);
    return SUCCESS;
}

int nvmlDeviceGetMigMode(Device *device, unsigned *current, unsigned *pending) {
    REFUSE_IF_TOLD;
    if (!setting("FAKE_NVML_MIG", 0)) return NOT_SUPPORTED;
    *current = *pending = 1;
    return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(Device *device, unsigned *count) {
    REFUSE_IF_TOLD;
    *count = 7;
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(Device *device, unsigned place, Device **instance) {
    REFUSE_IF_TOLD;
    if (place >= 2) return NOT_FOUND;
    instances[device->index][place] = (Device){device->index, place};
    *instance = &instances[device->index][place];
    return SUCCESS;
}

/* What both memory calls refuse, and how much is used: 1 MiB more at every read. */
static int used_memory(Device *device, unsigned long long *used) {
    int index = device->index;
    if (device->instance < 0 && setting("FAKE_NVML_MIG", 0)) return NO_PERMISSION;
    if (setting("FAKE_NVML_MEMORY", SUCCESS)) return setting("FAKE_NVML_MEMORY", SUCCESS);
    if (index == setting("FAKE_NVML_LOSES", -1) && ++reads[index] > 3) return LOST;
    *used = (1000 * (index + 1) + reads[index]) * MIB;
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(Device *device, Memory *memory) {
    REFUSE_IF_TOLD;
    unsigned long long used;
    int status = used_memory(device, &used);
    if (status) return status;
    used += 450 * MIB; /* v1 counts what the driver keeps as used */
    *memory = (Memory){24576 * MIB, 24576 * MIB - used, used};
    return SUCCESS;
}

#ifndef V1_ONLY
int nvmlDeviceGetMemoryInfo_v2(Device *device, Memory2 *memory) {
    REFUSE_IF_TOLD;
    unsigned long long used, reserved = 450 * MIB;
    if (memory->version != (sizeof(Memory2) | 2 << 24)) return INVALID;
    if (setting("FAKE_NVML_V2", SUCCESS)) return setting("FAKE_NVML_V2", SUCCESS);
    int status = used_memory(device, &used);
    if (status) return status;
    *memory = (Memory2){memory->version, 24576 * MIB, reserved, 24576 * MIB - reserved - used, used};
    if (setting("FAKE_NVML_NO_FIGURES", 0)) memory->used = memory->free = NOT_AVAILABLE;
    return SUCCESS;
}

#endif

static int list(unsigned *count, Process *processes, const Process *listed, unsigned length) {
    int refusal = setting("FAKE_NVML_PROCESSES", SUCCESS);
    if (refusal) return refusal;
    unsigned room = *count;
    *count = length;
    if (room < length) return TOO_SMALL;
    memcpy(processes, listed, length * sizeof(Process));
    return SUCCESS;
}

int COMPUTE(Device *device, unsigned *count, Process *processes) {
    REFUSE_IF_TOLD;
    static unsigned asked; /* FAKE_NVML_ENDS: every second time the larger process is not there */
    unsigned long long used = setting("FAKE_NVML_NO_FIGURES", 0) ? NOT_AVAILABLE : 600 * MIB;
    const Process listed[] = {{77, 200 * MIB, 0, 0}, {4242, used, 0, 0}};
    int ended = setting("FAKE_NVML_ENDS", 0) && processes && asked++ % 2;
    return list(count, processes, listed, ended ? 1 : 2);
}

int GRAPHICS(Device *device, unsigned *count, Process *processes) {
    REFUSE_IF_TOLD;
    const Process listed[] = {{77, 210 * MIB, 0, 0}};
    return list(count, processes, listed, 1);
}

int nvmlSystemGetProcessName(unsigned pid, char *name, unsigned length) {
    REFUSE_IF_TOLD;
    if (pid == 77) return NOT_FOUND;
    static unsigned asked;
    snprintf(name, length, "serve.py\x1b[2J");
    if (setting("FAKE_NVML_ENDS", 0)) snprintf(name, length, "program %u", asked++);
    return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(Device *device, Utilization *rates) {
    REFUSE_IF_TOLD;
    if (device->instance >= 0) return NOT_SUPPORTED;
    *rates = (Utilization){87, 41};
    return SUCCESS;
}

// The values that the two Java processes of harness.java send each other: a graph of objects, as a flat table.
//
// A message refers to objects by their index in the table, and both ends number them alike, from the call to its reply.
// So an answer can be one of the arguments, objects may contain each other, and no depth needs recursion. Each message
// describes the new objects and those whose content has changed, and the reader changes its own objects accordingly.
//
// An object of the prompt's classes is sent by its fields, and keeps its identity for the whole run. A subclass of the
// program's is sent as the JDK's class that it extends: the reader builds values of its own and runs no code of the
// writer. An object that the tests pass for its interface (a lambda, a comparator) becomes a proxy that calls back.

import java.lang.reflect.*;
import java.math.BigDecimal;
import java.math.BigInteger;
import java.nio.ByteBuffer;
import java.util.*;

/** One end's knowledge of the prompt's classes, and of the objects that keep their identity between calls. */
class NanoRlhfSession {
    final ClassLoader loader;
    final boolean isHarness;
    final Map<String, Field[]> fields = new HashMap<>(); // of the prompt's classes, with the inherited fields
    private final Map<Integer, Object> objects = new HashMap<>();
    private final Map<Object, Integer> numbers = new IdentityHashMap<>();
    private final Map<Class<?>, Constructor<?>> allocators = new HashMap<>();

    NanoRlhfSession(ClassLoader loader, boolean isHarness) {
        this.loader = loader;
        this.isHarness = isHarness;
    }

    Object get(int number) {
        return objects.get(number);
    }

    void put(int number, Object object) {
        objects.put(number, object);
        numbers.put(object, number);
    }

    boolean has(Object object) {
        return numbers.containsKey(object);
    }

    /** The harness's objects have even numbers, the program's odd ones. 0: no number. */
    int number(Object object) {
        Integer number = numbers.get(object);
        if (number == null) {
            number = 2 * numbers.size() + (isHarness ? 2 : 3);
            put(number, object);
        }
        return number;
    }

    boolean declares(Class<?> type) {
        return type.getClassLoader() == loader && fields.containsKey(type.getName());
    }

    /** A new object without running its constructor; an exception gets its message and stack trace. */
    Object allocate(Class<?> type, String message) throws ReflectiveOperationException {
        boolean isThrown = Throwable.class.isAssignableFrom(type);
        Constructor<?> constructor = allocators.get(type);
        if (constructor == null) {
            Constructor<?> base = isThrown ? Throwable.class.getConstructor(String.class) : Object.class.getConstructor();
            constructor = sun.reflect.ReflectionFactory.getReflectionFactory().newConstructorForSerialization(type, base);
            allocators.put(type, constructor);
        }
        return isThrown ? constructor.newInstance(message) : constructor.newInstance();
    }

    /** The interfaces of an object that the tests pass for its methods; empty for any other object. */
    List<Class<?>> interfaces(Object object) {
        List<Class<?>> found = new ArrayList<>();
        Class<?> type = object.getClass();
        boolean isOwn = (type.isHidden() || type.getClassLoader() == loader) && type.getSuperclass() == Object.class;
        boolean isFunction = isOwn || object instanceof Comparator || object instanceof Iterator;
        if (Proxy.isProxyClass(type) ? has(object) : isHarness && isFunction) {
            for (; type != null; type = type.getSuperclass()) {
                for (Class<?> each : type.getInterfaces()) {
                    if (each.getClassLoader() == null ? Modifier.isPublic(each.getModifiers()) : declares(each)) {
                        found.add(each);
                    }
                }
            }
        }
        return found;
    }
}

/** The objects of a call and its reply. */
class NanoRlhfValues {
    /** The program's or the tests' object is no value. */
    static class Refused extends RuntimeException {
        Refused(Class<?> type) {
            super(type.getName(), null, false, false);
        }
    }

    /** An object as it is sent: what it is, and what it holds, with a Reference for each object. */
    private static class Node {
        final char kind; // A array, C container, U unmodifiable, O the prompt's, T exception, F function, X new Object()
        final String type;
        final int number; // in the session
        final Object[] data;

        Node(char kind, String type, int number, Object[] data) {
            this.kind = kind;
            this.type = type;
            this.number = number;
            this.data = data;
        }

        boolean equals(Node other) {
            return kind == other.kind && type.equals(other.type) && Arrays.equals(data, other.data);
        }
    }

    private static class Reference {
        final int index;

        Reference(int index) {
            this.index = index;
        }

        @Override public boolean equals(Object other) {
            return other instanceof Reference && ((Reference) other).index == index;
        }

        @Override public int hashCode() {
            return index;
        }
    }

    /** Keeps the order in which the other process's comparator gave the items. */
    private static class Rank implements Comparator<Object> {
        final Map<Object, Integer> ranks = new HashMap<>();

        @Override public int compare(Object a, Object b) {
            return ranks.getOrDefault(a, ranks.size()).compareTo(ranks.getOrDefault(b, ranks.size()));
        }
    }

    private static final Object[] NONE = {};
    private static final Object[] ORDERS =
        {Collections.reverseOrder(), Comparator.naturalOrder(), String.CASE_INSENSITIVE_ORDER};
    private final NanoRlhfSession session;
    private final List<Object> objects = new ArrayList<>();
    private final Map<Object, Integer> indices = new IdentityHashMap<>();
    private final List<Node> known = new ArrayList<>(); // what the other end has of these objects

    NanoRlhfValues(NanoRlhfSession session) {
        this.session = session;
    }

    // ------------------------------------------------------------------------------------- 1. from objects to nodes
    /** A value without identity as it is; an object as a reference. */
    private Object slot(Object value) {
        if (value == null || value instanceof String || value instanceof Integer || isPlain(value)) {
            return value;
        }
        Integer index = indices.get(value);
        if (index == null) {
            index = objects.size();
            objects.add(value);
            indices.put(value, index);
        }
        return new Reference(index);
    }

    private boolean isPlain(Object value) {
        Class<?> type = value.getClass();
        if (value instanceof Enum<?> constant) {
            type = constant.getDeclaringClass();
            return type.getClassLoader() == null || session.declares(type);
        }
        return value instanceof Boolean || value instanceof Byte || value instanceof Short || value instanceof Character
            || value instanceof Long || value instanceof Float || value instanceof Double || type == BigInteger.class
            || type == BigDecimal.class || isParsed(type.getName()) || orderOf(value) >= 0;
    }

    private static int orderOf(Object value) {
        for (int i = 0; i < ORDERS.length; i++) {
            if (value == ORDERS[i]) {
                return i;
            }
        }
        return -1;
    }

    /** Whether a class is immutable, and reads what it writes. */
    private static boolean isParsed(String type) {
        switch (type) {
            case "java.time.LocalDate": case "java.time.LocalTime": case "java.time.LocalDateTime": case "java.time.Instant":
            case "java.time.Duration": case "java.time.Period": case "java.time.Year": case "java.time.YearMonth":
            case "java.time.MonthDay": case "java.time.ZonedDateTime": case "java.time.OffsetDateTime":
            case "java.time.OffsetTime": case "java.util.UUID": return true;
            default: return false;
        }
    }

    private Object[] slots(Object[] values) {
        Object[] slots = new Object[values.length];
        for (int i = 0; i < slots.length; i++) {
            slots[i] = slot(values[i]);
        }
        return slots;
    }

    private Node describe(Object value) {
        Class<?> type = value.getClass();
        if (type.isArray()) {
            Class<?> item = type;
            while (item.isArray()) {
                item = item.getComponentType();
            }
            if (item.getClassLoader() != null && !session.declares(item)) {
                throw new Refused(type);
            }
            Object[] items = new Object[Array.getLength(value)];
            for (int i = 0; i < items.length; i++) {
                items[i] = slot(Array.get(value, i));
            }
            return new Node('A', type.getName(), 0, items);
        } else if (session.declares(type)) {
            return new Node('O', type.getName(), type.isRecord() ? 0 : session.number(value), fieldsOf(value));
        }
        List<Class<?>> interfaces = session.interfaces(value);
        if (!interfaces.isEmpty()) {
            StringJoiner names = new StringJoiner(",");
            for (Class<?> each : interfaces) {
                names.add(each.getName());
            }
            return new Node('F', names.toString(), session.number(value), NONE);
        } else if (type == Object.class && (session.isHarness || session.has(value))) {
            return new Node('X', type.getName(), session.number(value), NONE);
        }
        Class<?> base = type; // the JDK's class that it extends
        while (base.getClassLoader() != null || base.isHidden()) {
            base = base.getSuperclass();
            if (session.declares(base)) {
                throw new Refused(type);
            }
        }
        if (value instanceof Throwable thrown) {
            return new Node('T', base.getName(), session.number(value), new Object[] {thrown.getMessage()});
        }
        return container(value, base);
    }

    private Object[] fieldsOf(Object value) {
        Field[] fields = session.fields.get(value.getClass().getName());
        int first = value instanceof Throwable ? 1 : 0;
        Object[] data = new Object[first + fields.length];
        if (first == 1) {
            data[0] = ((Throwable) value).getMessage();
        }
        for (int i = 0; i < fields.length; i++) {
            try {
                data[first + i] = slot(fields[i].get(value));
            } catch (IllegalAccessException error) {
                throw new IllegalStateException(error);
            }
        }
        return data;
    }

    private Node container(Object value, Class<?> base) {
        String name = base.getName();
        boolean isFixed = name.startsWith("java.util.ImmutableCollections") || name.startsWith("java.util.Collections$Unm")
            || name.startsWith("java.util.Collections$E") || name.startsWith("java.util.Collections$Si");
        List<Object> items = new ArrayList<>();
        if (value instanceof Map<?, ?> map) {
            if (map instanceof SortedMap<?, ?> sorted && isNew(base)) {
                items.add(order(sorted.comparator()));
            }
            for (Map.Entry<?, ?> entry : map.entrySet()) {
                items.add(slot(entry.getKey()));
                items.add(slot(entry.getValue()));
            }
            return isFixed ? new Node('U', "map", 0, items.toArray())
                : new Node('C', isNew(base) ? name : "java.util.LinkedHashMap", 0, items.toArray());
        } else if (value instanceof Map.Entry<?, ?> entry) {
            boolean isOpen = !name.endsWith("Holder") && !name.contains("Immutable");
            return new Node('U', isOpen ? "entry" : "fixed entry", 0, slots(new Object[] {entry.getKey(), entry.getValue()}));
        } else if (value instanceof Optional<?> optional) {
            return new Node('U', name, 0, slots(optional.isPresent() ? new Object[] {optional.get()} : NONE));
        } else if (value instanceof OptionalInt || value instanceof OptionalLong || value instanceof OptionalDouble) {
            Object number = value instanceof OptionalInt i && i.isPresent() ? i.getAsInt()
                : value instanceof OptionalLong l && l.isPresent() ? (Object) l.getAsLong()
                : value instanceof OptionalDouble d && d.isPresent() ? d.getAsDouble() : null;
            return new Node('U', name, 0, number == null ? NONE : new Object[] {number});
        } else if (value instanceof StringBuilder || value instanceof StringBuffer) {
            return new Node('C', name, 0, new Object[] {value.toString()});
        } else if (value instanceof BitSet bits) {
            return new Node('C', name, 0, bits.stream().boxed().toArray());
        } else if (!(value instanceof Collection)) {
            throw new Refused(value.getClass());
        }
        Collection<?> collection = (Collection<?>) value;
        Comparator<?> order = value instanceof SortedSet<?> set ? set.comparator()
            : value instanceof PriorityQueue<?> queue ? queue.comparator() : null;
        if ((value instanceof SortedSet || value instanceof PriorityQueue) && isNew(base)) {
            items.add(order(order));
        }
        items.addAll(Arrays.asList(slots(collection.toArray())));
        if (value instanceof PriorityQueue && items.get(0) == Boolean.TRUE) { // again, in the order of its comparator
            for (PriorityQueue<?> rest = new PriorityQueue<>((PriorityQueue<?>) value); !rest.isEmpty(); ) {
                items.add(slot(rest.poll()));
            }
        }
        String interfaceName = value instanceof List ? "list" : value instanceof Set ? "set" : "collection";
        if (isFixed || interfaceName.equals("collection") && !isNew(base)) {
            if (value.getClass() != base) {
                throw new Refused(value.getClass());
            }
            return new Node('U', interfaceName, 0, items.toArray());
        } else if (!isNew(base) && !name.equals("java.util.Arrays$ArrayList")) {
            name = value instanceof List ? "java.util.ArrayList" : "java.util.LinkedHashSet";
        }
        return new Node('C', name, 0, items.toArray());
    }

    /** Whether a class is one of the JDK's containers that can be made empty. */
    private static boolean isNew(Class<?> type) {
        boolean isContainer =
            Collection.class.isAssignableFrom(type) || Map.class.isAssignableFrom(type) || type == BitSet.class;
        try {
            return isContainer && type.getName().startsWith("java.util.") && type.getName().indexOf('$') < 0
                && !Modifier.isAbstract(type.getModifiers()) && Modifier.isPublic(type.getConstructor().getModifiers());
        } catch (NoSuchMethodException none) {
            return false;
        }
    }

    /** A comparator that both ends have, or TRUE: by the order of the items. */
    private Object order(Comparator<?> order) {
        boolean isSent = order == null || orderOf(order) >= 0 || !session.interfaces(order).isEmpty();
        return isSent && !(order instanceof Rank) ? slot(order) : Boolean.TRUE;
    }

    // ------------------------------------------------------------------------------------- 2. from nodes to objects
    private Class<?> known(String type) throws ClassNotFoundException {
        boolean isDeclared = session.fields.containsKey(type);
        return Class.forName(type, isDeclared, isDeclared ? session.loader : null);
    }

    /** A new object that is still empty; null if it can't be made without its items. */
    @SuppressWarnings("unchecked")
    private Object shell(Node node) throws ReflectiveOperationException {
        Object existing = node.number == 0 ? null : session.get(node.number);
        switch (node.kind) {
            case 'A':
                Class<?> type = Class.forName(node.type, false, session.loader);
                for (Class<?> item = type; ; item = item.getComponentType()) {
                    if (!item.isArray() && item.getClassLoader() != null && !session.declares(item)) {
                        throw new IllegalArgumentException(node.type);
                    } else if (!item.isArray()) {
                        break;
                    }
                }
                return Array.newInstance(type.getComponentType(), node.data.length);
            case 'O':
                Class<?> of = known(node.type);
                if (!session.declares(of)) {
                    throw new IllegalArgumentException(node.type);
                } else if (of.isRecord()) {
                    return null;
                } else if (session.isHarness && existing != null) {
                    return of.cast(existing);
                } else if (existing == null || of != existing.getClass()) {
                    boolean isThrown = Throwable.class.isAssignableFrom(of);
                    existing = session.allocate(of, isThrown ? (String) node.data[0] : null);
                    session.put(node.number, existing);
                }
                return existing;
            case 'F':
                if (existing == null && !session.isHarness) {
                    String[] names = node.type.split(",");
                    Class<?>[] interfaces = new Class<?>[names.length];
                    for (int i = 0; i < names.length; i++) {
                        interfaces[i] = known(names[i]);
                    }
                    existing = NanoRlhfProgram.function(node.number, interfaces);
                    session.put(node.number, existing);
                }
                return Objects.requireNonNull(existing);
            case 'X':
                if (existing == null && !session.isHarness) {
                    existing = new Object();
                    session.put(node.number, existing);
                }
                return Objects.requireNonNull(existing);
            case 'T':
                if (existing == null) {
                    Class<?> thrown = Class.forName(node.type, false, null);
                    if (!Throwable.class.isAssignableFrom(thrown)) {
                        throw new IllegalArgumentException(node.type);
                    }
                    existing = session.allocate(thrown, (String) node.data[0]);
                    session.put(node.number, existing);
                }
                return existing;
            case 'U':
                return null;
            case 'C':
                if (node.type.equals("java.util.Arrays$ArrayList")) {
                    return Arrays.asList(new Object[node.data.length]);
                } else if (node.type.equals("java.lang.StringBuilder") || node.type.equals("java.lang.StringBuffer")) {
                    return node.type.endsWith("Buffer") ? new StringBuffer() : new StringBuilder();
                }
                Class<?> container = Class.forName(node.type, false, null);
                if (!isNew(container)) {
                    throw new IllegalArgumentException(node.type);
                } else if (isOrdered(container)) {
                    Object order = node.data[0];
                    order = order == Boolean.TRUE ? new Rank() : resolve(order);
                    return container.getConstructor(Comparator.class).newInstance(order);
                }
                return container.getConstructor().newInstance();
            default: throw new IllegalArgumentException("an object of kind " + node.kind);
        }
    }

    private static boolean isOrdered(Class<?> container) {
        return SortedMap.class.isAssignableFrom(container) || SortedSet.class.isAssignableFrom(container)
            || container == PriorityQueue.class;
    }

    private Object resolve(Object slot) {
        return slot instanceof Reference reference ? objects.get(reference.index) : slot;
    }

    private Object[] resolve(Node node, int start) {
        Object[] items = new Object[node.data.length - start];
        for (int i = 0; i < items.length; i++) {
            items[i] = resolve(node.data[start + i]);
        }
        return items;
    }

    /** Give an object its items, or make it; the objects that it holds have theirs. */
    @SuppressWarnings("unchecked")
    private void fill(int index, Node node, boolean isOld) throws ReflectiveOperationException {
        Object object = objects.get(index);
        if (isOld && object != null && same(describe(object), node)) {
            return;
        } else if (node.kind == 'A') {
            if (object.getClass().getName().equals(node.type) && Array.getLength(object) == node.data.length) {
                for (int i = 0; i < node.data.length; i++) {
                    Array.set(object, i, resolve(node.data[i]));
                }
                return;
            }
        } else if (node.kind == 'C' && (!isOld || describe(object).type.equals(node.type))) {
            refill(object, node);
            return;
        } else if (node.kind == 'O' && object != null) {
            Field[] fields = session.fields.get(node.type);
            Object[] data = resolve(node, object instanceof Throwable ? 1 : 0);
            for (int i = 0; i < fields.length; i++) {
                if (fields[i].get(object) != data[i]) {
                    fields[i].set(object, data[i]);
                }
            }
            return;
        } else if (isOld && node.type.equals("entry")) {
            ((Map.Entry<?, Object>) object).setValue(resolve(node, 0)[1]);
            return;
        } else if (!isOld) {
            if (object == null) {
                objects.set(index, node.kind == 'O' ? record(node) : unmodifiable(node.type, resolve(node, 0)));
            }
            return;
        }
        throw new IllegalArgumentException("changed " + node.type);
    }

    /** Compare without the order of a HashMap, which depends on its history. */
    private static boolean same(Node a, Node b) {
        if (!a.type.equals(b.type) || !a.type.equals("java.util.HashMap") && !a.type.equals("java.util.HashSet")) {
            return a.equals(b);
        }
        int step = a.type.endsWith("Map") ? 2 : 1;
        return bag(a.data, step).equals(bag(b.data, step));
    }

    private static Map<Object, Object> bag(Object[] items, int step) {
        Map<Object, Object> bag = new HashMap<>();
        for (int i = 0; i < items.length; i += step) {
            bag.put(items[i], items[i + step - 1]);
        }
        return bag;
    }

    @SuppressWarnings("unchecked")
    private void refill(Object object, Node node) {
        if (object instanceof BitSet bits) {
            bits.clear();
            for (Object bit : node.data) {
                bits.set((int) bit);
            }
            return;
        } else if (object instanceof StringBuilder builder) {
            builder.setLength(0);
            builder.append(node.data[0]);
            return;
        } else if (object instanceof StringBuffer buffer) {
            buffer.setLength(0);
            buffer.append(node.data[0]);
            return;
        }
        int first = isOrdered(object.getClass()) ? 1 : 0;
        Object[] items = resolve(node, first);
        int count = items.length;
        if (first == 1 && node.data[0] == Boolean.TRUE) {
            boolean isQueue = object instanceof PriorityQueue;
            count = isQueue ? count / 2 : count;
            Comparator<?> order = object instanceof SortedMap<?, ?> map ? map.comparator()
                : isQueue ? ((PriorityQueue<?>) object).comparator() : ((SortedSet<?>) object).comparator();
            for (int i = isQueue ? count : 0; i < items.length; i += object instanceof Map ? 2 : 1) {
                if (order instanceof Rank rank) {
                    rank.ranks.putIfAbsent(items[i], i);
                }
            }
        }
        if (object instanceof Map) {
            Map<Object, Object> map = (Map<Object, Object>) object;
            map.clear();
            for (int i = 0; i + 1 < count; i += 2) {
                map.put(items[i], items[i + 1]);
            }
        } else if (object instanceof List && ((List<?>) object).size() == count) {
            for (int i = 0; i < count; i++) { // Arrays.asList has a fixed size
                ((List<Object>) object).set(i, items[i]);
            }
        } else {
            Collection<Object> collection = (Collection<Object>) object;
            collection.clear();
            for (int i = 0; i < count; i++) {
                collection.add(items[i]);
            }
        }
    }

    private Object record(Node node) throws ReflectiveOperationException {
        Class<?> type = known(node.type);
        RecordComponent[] components = type.getRecordComponents();
        Class<?>[] types = new Class<?>[components.length];
        for (int i = 0; i < types.length; i++) {
            types[i] = components[i].getType();
        }
        Constructor<?> constructor = type.getDeclaredConstructor(types);
        constructor.setAccessible(true);
        return constructor.newInstance(resolve(node, 0));
    }

    private static Object unmodifiable(String type, Object[] items) {
        switch (type) {
            case "list": return Collections.unmodifiableList(Arrays.asList(items));
            case "set": return Collections.unmodifiableSet(new LinkedHashSet<>(Arrays.asList(items)));
            case "collection": return Collections.unmodifiableCollection(Arrays.asList(items));
            case "entry": return new AbstractMap.SimpleEntry<>(items[0], items[1]);
            case "fixed entry": return new AbstractMap.SimpleImmutableEntry<>(items[0], items[1]);
            case "java.util.Optional": return items.length == 0 ? Optional.empty() : Optional.of(items[0]);
            case "java.util.OptionalInt": return items.length == 0 ? OptionalInt.empty() : OptionalInt.of((int) items[0]);
            case "java.util.OptionalLong":
                return items.length == 0 ? OptionalLong.empty() : OptionalLong.of((long) items[0]);
            case "java.util.OptionalDouble":
                return items.length == 0 ? OptionalDouble.empty() : OptionalDouble.of((double) items[0]);
            case "map":
                Map<Object, Object> map = new LinkedHashMap<>();
                for (int i = 0; i + 1 < items.length; i += 2) {
                    map.put(items[i], items[i + 1]);
                }
                return Collections.unmodifiableMap(map);
            default: throw new IllegalArgumentException(type);
        }
    }

    // ------------------------------------------------------------------------------------- 3. from nodes to bytes
    private ByteBuffer bytes;

    /** A message: a value, new objects, and the known ones that have changed. Throws Refused, then nothing is known. */
    byte[] write(Object root) {
        return write(root, true);
    }

    byte[] write(Object root, boolean withChanges) {
        int before = objects.size();
        List<Node> now = new ArrayList<>();
        try {
            for (int i = 0; i < before; i++) {
                now.add(withChanges ? describe(objects.get(i)) : known.get(i));
            }
            Object slot = slot(root);
            for (int i = before; i < objects.size(); i++) { // it grows meanwhile
                now.add(describe(objects.get(i)));
            }
            bytes = ByteBuffer.allocate(256);
            room(4).putInt(objects.size());
            writeSlot(slot);
            for (int i = 0; i < now.size(); i++) {
                if (i >= before || !now.get(i).equals(known.get(i))) {
                    room(4).putInt(i);
                    writeNode(now.get(i));
                }
            }
            room(4).putInt(-1);
        } catch (RuntimeException | Error error) {
            while (objects.size() > before) {
                indices.remove(objects.remove(objects.size() - 1));
            }
            throw error;
        }
        known.clear();
        known.addAll(now);
        byte[] message = Arrays.copyOf(bytes.array(), bytes.position());
        bytes = null;
        return message;
    }

    private ByteBuffer room(int size) {
        if (bytes.remaining() < size) {
            bytes = ByteBuffer.allocate(Math.max(2 * bytes.capacity(), bytes.position() + size))
                .put(bytes.array(), 0, bytes.position());
        }
        return bytes;
    }

    private void writeText(String text) {
        room(4 + 2 * text.length()).putInt(text.length());
        bytes.asCharBuffer().put(text); // UTF-16 can encode any string, unlike UTF-8
        bytes.position(bytes.position() + 2 * text.length());
    }

    private void writeNode(Node node) {
        room(1).put((byte) node.kind);
        writeText(node.type);
        room(8).putInt(node.number);
        bytes.putInt(node.data.length);
        for (Object slot : node.data) {
            writeSlot(slot);
        }
    }

    private void writeSlot(Object slot) {
        room(9);
        if (slot == null) {
            bytes.put((byte) 'n');
        } else if (slot instanceof Reference v) {
            bytes.put((byte) 'r').putInt(v.index);
        } else if (slot instanceof Integer v) {
            bytes.put((byte) 'I').putInt(v);
        } else if (slot instanceof String v) {
            bytes.put((byte) 't');
            writeText(v);
        } else if (slot instanceof Boolean v) {
            bytes.put((byte) 'Z').put((byte) (v ? 1 : 0));
        } else if (slot instanceof Byte v) {
            bytes.put((byte) 'B').put(v);
        } else if (slot instanceof Short v) {
            bytes.put((byte) 'S').putShort(v);
        } else if (slot instanceof Character v) {
            bytes.put((byte) 'C').putChar(v);
        } else if (slot instanceof Long v) {
            bytes.put((byte) 'J').putLong(v);
        } else if (slot instanceof Float v) {
            bytes.put((byte) 'F').putInt(Float.floatToRawIntBits(v));
        } else if (slot instanceof Double v) {
            bytes.put((byte) 'D').putLong(Double.doubleToRawLongBits(v));
        } else if (slot instanceof BigInteger v) {
            bytes.put((byte) 'i');
            writeText(v.toString());
        } else if (slot instanceof BigDecimal v) {
            bytes.put((byte) 'd');
            writeText(v.unscaledValue().toString());
            room(4).putInt(v.scale());
        } else if (orderOf(slot) >= 0) {
            bytes.put((byte) 'o').put((byte) orderOf(slot));
        } else if (slot instanceof Enum<?> v) {
            bytes.put((byte) 'e');
            writeText(v.getDeclaringClass().getName());
            writeText(v.name());
        } else {
            bytes.put((byte) 'p');
            writeText(slot.getClass().getName());
            writeText(slot.toString());
        }
    }

    // ------------------------------------------------------------------------------------- 4. from bytes to nodes
    /** Read a message. Throws a RuntimeException or ReflectiveOperationException if it isn't valid. */
    Object read(byte[] message, int start) throws ReflectiveOperationException {
        bytes = ByteBuffer.wrap(message, start, message.length - start);
        int before = objects.size();
        int total = bytes.getInt();
        if (total < before || total - before > bytes.remaining()) {
            throw new IllegalArgumentException(total + " objects");
        }
        Object root = readSlot();
        Node[] nodes = new Node[total];
        for (int index = bytes.getInt(); index != -1; index = bytes.getInt()) {
            nodes[index] = readNode();
        }
        for (int i = before; i < total; i++) {
            objects.add(null);
            if (nodes[i].kind == 'F') { // a comparator is needed to make a container
                objects.set(i, shell(nodes[i]));
            }
        }
        for (int i = before; i < total; i++) {
            if (objects.get(i) == null) {
                objects.set(i, shell(nodes[i]));
            }
        }
        boolean[] seen = new boolean[total];
        for (int i = 0; i < total; i++) {
            if (nodes[i] != null && !seen[i]) {
                fillFrom(i, nodes, seen, before);
            }
        }
        for (int i = before; i < total; i++) {
            indices.put(objects.get(i), i);
        }
        for (int i = 0; i < total; i++) {
            Node node = nodes[i] == null ? known.get(i) : describe(objects.get(i));
            if (i < before) {
                known.set(i, node);
            } else {
                known.add(node);
            }
        }
        if (objects.size() != total || bytes.hasRemaining()) {
            throw new IllegalArgumentException("more than a message");
        }
        bytes = null;
        return resolve(root);
    }

    /** Fill what an object holds before the object itself, because a HashSet needs the hash codes. */
    private void fillFrom(int start, Node[] nodes, boolean[] seen, int before) throws ReflectiveOperationException {
        Deque<int[]> path = new ArrayDeque<>(); // index, number of its items that are done
        path.push(new int[] {start, 0});
        seen[start] = true;
        while (!path.isEmpty()) {
            int[] top = path.peek();
            Object[] data = nodes[top[0]].data;
            if (top[1] == data.length) {
                fill(top[0], nodes[top[0]], top[0] < before);
                path.pop();
            } else if (data[top[1]++] instanceof Reference inner && nodes[inner.index] != null && !seen[inner.index]) {
                seen[inner.index] = true;
                path.push(new int[] {inner.index, 0});
            }
        }
    }

    private int readLength(int size) {
        int length = bytes.getInt();
        if (length < 0 || (long) length * size > bytes.remaining()) {
            throw new IllegalArgumentException(length + " items");
        }
        return length;
    }

    private String readText() {
        char[] text = new char[readLength(2)];
        bytes.asCharBuffer().get(text);
        bytes.position(bytes.position() + 2 * text.length);
        return new String(text);
    }

    private Node readNode() {
        char kind = (char) bytes.get();
        String type = readText();
        int number = bytes.getInt();
        Object[] slots = new Object[readLength(1)];
        for (int i = 0; i < slots.length; i++) {
            slots[i] = readSlot();
        }
        return new Node(kind, type, number, slots);
    }

    @SuppressWarnings({"unchecked", "rawtypes"})
    private Object readSlot() {
        int tag = bytes.get();
        try {
            switch (tag) {
                case 'n': return null;
                case 'r': return new Reference(bytes.getInt());
                case 'Z': return bytes.get() != 0;
                case 'B': return bytes.get();
                case 'S': return bytes.getShort();
                case 'C': return bytes.getChar();
                case 'I': return bytes.getInt();
                case 'J': return bytes.getLong();
                case 'F': return Float.intBitsToFloat(bytes.getInt());
                case 'D': return Double.longBitsToDouble(bytes.getLong());
                case 't': return readText().intern(); // like the literals in the tests: programs compare them by ==
                case 'i': return new BigInteger(readText());
                case 'd': return new BigDecimal(new BigInteger(readText()), bytes.getInt());
                case 'o': return ORDERS[bytes.get()];
                case 'e': return Enum.valueOf((Class) known(readText()), readText());
                case 'p': {
                    String type = readText();
                    if (!isParsed(type)) {
                        throw new IllegalArgumentException(type);
                    } else if (type.equals("java.util.UUID")) {
                        return UUID.fromString(readText());
                    }
                    return Class.forName(type).getMethod("parse", CharSequence.class).invoke(null, readText());
                }
                default: throw new IllegalArgumentException("a value of type " + tag);
            }
        } catch (ReflectiveOperationException error) {
            throw new IllegalArgumentException(error);
        }
    }
}
